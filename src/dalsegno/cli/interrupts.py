"""Ctrl-C: while nothing is under way it simply ends us; while work is done, the work is told."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # 128 and SIGINT, as a shell tells it
STOPS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Somebody wants us to end: by Ctrl-C, or as `kill` and `timeout` ask for it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number
        self.word = "interrupted" if number == signal.SIGINT else "told to end"


def end_at_once() -> None:
    """For the imports and readings at the start, where a KeyboardInterrupt would come out of some library's depth."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt here, so that what is half done can be said."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stoppable() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise `Stopped` here, so that what was begun is tidied away; a second of them ends us at
    once."""
    before = {number: signal.signal(number, _stop) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    for each in STOPS:
        signal.signal(each, signal.SIG_DFL)
    raise Stopped(number)


def to_the_end(tidy: Callable[[], None]) -> None:
    """The first signal does not cut this short: it is done again from its start, and the signal counts after that."""
    try:
        tidy()
    except Stopped:
        tidy()
        raise
