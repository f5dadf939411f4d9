"""What a worker hears of its saver: each save once, the newest for sure, and its death."""

from __future__ import annotations

import json
import socket

import pytest

pytest.importorskip("torch")

from dalsegno.train.saver import Request, SaverTerms
from dalsegno.train.saver_client import Saver

TERMS = SaverTerms("/nowhere", "run", 1, 0, 1, 3)


def saver_and_its_end() -> tuple[Saver, socket.socket]:
    """A saver whose process is played by the test."""
    ours, its = socket.socketpair()
    saver = Saver(0, None)
    saver._sock = ours
    return saver, its


def answer(its: socket.socket, step: int, why: str = "", **more: object) -> None:
    its.sendall(json.dumps({"step": step, "slot": f"slot-{step}", "seconds": 1.0, "why": why, **more}).encode() + b"\n")


def test_a_save_is_waited_for_past_those_it_has_overtaken() -> None:
    saver, its = saver_and_its_end()
    for step in (50, 100):
        saver.ask(Request(TERMS, step, f"slot-{step}"))
    answer(its, 50, "given up", overtaken=True)
    answer(its, 100)
    assert saver.wait(100, 10).why == "" and saver.busy == {}


def test_a_save_that_was_overtaken_says_so() -> None:
    saver, its = saver_and_its_end()
    saver.ask(Request(TERMS, 50, "slot-50"))
    answer(its, 50, "given up", overtaken=True)
    assert [(result.step, result.overtaken) for result in saver.results(10)] == [(50, True)]


def test_nobody_waits_for_a_saver_that_has_died() -> None:
    saver, its = saver_and_its_end()
    saver.ask(Request(TERMS, 50, "slot-50"))
    its.close()
    assert saver.wait(50, 1800).why == "the saver has died"


def test_a_saver_that_has_died_is_told_with_the_step_it_was_asked_for() -> None:
    saver, its = saver_and_its_end()
    saver.ask(Request(TERMS, 50, "slot-50"))
    its.close()
    assert [(result.step, result.why) for result in saver.results(10)] == [(50, "the saver has died")]


def test_an_answer_for_an_older_step_in_the_same_slot_is_no_answer_for_the_newer() -> None:
    """A slot may be written to again while its older step is being committed."""
    saver, its = saver_and_its_end()
    for step in (50, 100):
        saver.ask(Request(TERMS, step, "slot"))
    answer(its, 50, slot="slot")
    assert [result.step for result in saver.results(10)] == [50]
    assert set(saver.busy) == {"slot"}
    answer(its, 100, slot="slot")
    assert saver.wait(100, 10).why == "" and not saver.busy
