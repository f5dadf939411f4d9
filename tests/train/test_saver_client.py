"""A worker gets the result of each save once, and notices the saver's death."""

from __future__ import annotations

import json
import socket

import pytest

pytest.importorskip("torch")

from dalsegno.train.saver import Request, SaverTerms
from dalsegno.train.saver_client import Saver

TERMS = SaverTerms("/nowhere", "run", 1, 0, 1, 3)


def saver_and_its_end() -> tuple[Saver, socket.socket]:
    """Return a saver whose process is simulated by the test."""
    ours, theirs = socket.socketpair()
    saver = Saver(0, None)
    saver._sock = ours
    return saver, theirs


def answer(theirs: socket.socket, step: int, why: str = "", **more: object) -> None:
    theirs.sendall(
        json.dumps({"step": step, "slot": f"slot-{step}", "seconds": 1.0, "why": why, **more}).encode() + b"\n"
    )


def test_wait_passes_over_results_of_overtaken_saves() -> None:
    saver, theirs = saver_and_its_end()
    for step in (50, 100):
        saver.ask(Request(TERMS, step, f"slot-{step}"))
    answer(theirs, 50, "abandoned", overtaken=True)
    answer(theirs, 100)
    assert saver.wait(100, 10).why == "" and saver.busy == {}


def test_overtaken_save_is_marked() -> None:
    saver, theirs = saver_and_its_end()
    saver.ask(Request(TERMS, 50, "slot-50"))
    answer(theirs, 50, "abandoned", overtaken=True)
    assert [(result.step, result.overtaken) for result in saver.results(10)] == [(50, True)]


def test_wait_ends_if_the_saver_dies() -> None:
    saver, theirs = saver_and_its_end()
    saver.ask(Request(TERMS, 50, "slot-50"))
    theirs.close()
    assert saver.wait(50, 1800).why == "the saver has died"


def test_death_of_the_saver_is_reported_with_its_step() -> None:
    saver, theirs = saver_and_its_end()
    saver.ask(Request(TERMS, 50, "slot-50"))
    theirs.close()
    assert [(result.step, result.why) for result in saver.results(10)] == [(50, "the saver has died")]


def test_answer_for_an_older_step_in_the_same_slot_does_not_count_for_the_newer() -> None:
    """A slot may be written to again while its older step is being committed."""
    saver, theirs = saver_and_its_end()
    for step in (50, 100):
        saver.ask(Request(TERMS, step, "slot"))
    answer(theirs, 50, slot="slot")
    assert [result.step for result in saver.results(10)] == [50]
    assert set(saver.busy) == {"slot"}
    answer(theirs, 100, slot="slot")
    assert saver.wait(100, 10).why == "" and not saver.busy
