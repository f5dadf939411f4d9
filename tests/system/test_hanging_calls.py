"""Tests of commands and calls that may hang."""

from __future__ import annotations

import threading
import time

import pytest

from dalsegno.system.hanging_calls import AbandonableCall, NoAnswer, TooLate, TooMuch, ask, slowness_at


def test_ask_returns_the_output() -> None:
    done = ask(["sh", "-c", "cat; echo oh >&2; exit 3"], stdin="hello")
    assert (done.stdout, done.stderr, done.exit_code) == ("hello", "oh\n", 3)


def test_output_of_a_command_is_limited() -> None:
    done = ask(("sh", "-c", "echo out; echo err >&2; exit 3"), most_bytes=8)
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n", "err\n", 3)
    with pytest.raises(TooMuch):
        ask(("yes",), most_bytes=1 << 20)
    with pytest.raises(TooLate):
        ask(("sleep", "60"), timeout_s=0.1, most_bytes=8)


def test_missing_command_raises_no_answer() -> None:
    with pytest.raises(NoAnswer, match="is not installed"):
        ask(["no-such-command"])


def test_hanging_command_is_killed_with_its_children() -> None:
    began = time.monotonic()
    with pytest.raises(TooLate, match=r"within 0.2 s"):
        ask(["sh", "-c", "sleep 600 & wait"], timeout_s=0.2)
    assert time.monotonic() - began < 60
    assert ask(["sh", "-c", "echo well"]).stdout == "well\n"


def test_hanging_call_is_abandoned_and_not_repeated() -> None:
    door = threading.Event()
    calls = []

    def call() -> str:
        calls.append(1)
        door.wait()
        return "well"

    patient = AbandonableCall("the library", call)
    with pytest.raises(TooLate, match=r"within 0.05 s"):
        patient.within(0.05)
    with pytest.raises(TooLate, match="still hangs"):
        patient.within(0.05)
    assert len(calls) == 1
    door.set()
    while True:
        try:
            assert patient.within(60) == "well"
            break
        except TooLate:  # the abandoned thread is about to end
            continue


def test_exception_of_a_call_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        AbandonableCall("sum", lambda: 1 / 0).within(60)


@pytest.mark.parametrize(("pace", "factor"), [(0.003, 1.0), (0.02, 1.0), (0.2, 10.0), (5.0, 30.0)])
def test_time_limits_scale_with_the_machine_speed(pace: float, factor: float) -> None:
    assert slowness_at(pace) == pytest.approx(factor)
