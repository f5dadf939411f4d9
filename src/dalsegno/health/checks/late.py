"""Run commands that may hang, and decide whether the service or this machine is to blame for a delay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dalsegno.health.node_reader import NodeReader
from dalsegno.health.result import Remedy, Result, Verdict, failed
from dalsegno.system.hanging_calls import NoAnswer, TooLate, pace_s

TIMEOUT_S, MAX_TIMEOUT_S = 1.25, 2.0  # usual and longest time limit for one command
SLOW_S = TIMEOUT_S / 5  # if an empty program takes this long, the machine is slow
SLOW = "slow"  # code of a result that is unknown because this machine is slow

_T = TypeVar("_T")


def ask_twice(node: NodeReader, question: Callable[[float], _T]) -> _T:
    """Return the result of `question`, which gets a time limit for its commands; if it raises TooLate, call it again.

    The second attempt starts from the beginning: a munge credential, for instance, can be decoded only once. After a
    second timeout, raise `TooLate` if an empty program takes less than SLOW_S; otherwise raise NoAnswer, because the
    machine is slow.
    """
    try:
        return question(TIMEOUT_S)
    except TooLate:
        took_s = node.pace_s()
    try:
        return question(min(max(TIMEOUT_S, 10 * took_s), MAX_TIMEOUT_S))
    except TooLate as error:
        took_s = max(took_s, node.pace_s())
        if took_s < SLOW_S:
            raise
        raise NoAnswer(_excused(str(error), took_s)) from error


def blame(text: str, remedy: Remedy, code: str, pace_s: Callable[[], float] = pace_s) -> Result:
    """Return a failed result for an operation that took too long or that the other side cut off after its own timeout.

    On a slow machine, return an unknown result instead.
    """
    took_s = pace_s()
    if took_s < SLOW_S:
        return failed(text, remedy, code)
    return Result(Verdict.UNKNOWN, _excused(text, took_s), code=SLOW)


def _excused(text: str, took_s: float) -> str:
    return f"{text}, but this machine is slow: an empty program takes {took_s:.2g} s"
