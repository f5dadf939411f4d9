"""Ctrl-C and its kin: while nothing is under way it simply ends us; while work is done, the work is told."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # 128 and SIGINT, as a shell tells it
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
STOPS = tuple(each for each in (signal.SIGINT, signal.SIGTERM, _HANGUP) if each is not None)
_WORDS = {signal.SIGINT: "interrupted", _HANGUP: "its terminal is gone"}


class Interrupted(KeyboardInterrupt):
    """Somebody wants us to end: by Ctrl-C, as `kill` and `timeout` ask for it, or by closing the terminal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number
        self.word = _WORDS.get(signal.Signals(number), "told to end")


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
    """Ctrl-C, SIGTERM and a lost terminal raise `Stopped` here, so that what was begun is tidied away; a second Ctrl-C
    or SIGTERM ends us at once. Under `nohup` a lost terminal is nothing to us."""
    numbers = [each for each in STOPS if each != _HANGUP or signal.getsignal(each) != signal.SIG_IGN]
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_DFL)
    if _HANGUP is not None:
        signal.signal(_HANGUP, lambda number, frame: None)  # a terminal that goes tells us twice: kernel and shell
        _let_go_of_lost_terminal()
    raise Interrupted(number)


def _let_go_of_lost_terminal() -> None:
    """What is said to one that is gone fails, and would keep us from tidying up."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        poll = select.poll()
        poll.register(stream, 0)
        if any(event & select.POLLHUP for _, event in poll.poll(0)):
            os.dup2(nowhere, stream)
    os.close(nowhere)


def to_the_end(tidy: Callable[[], None]) -> None:
    """The first signal does not cut this short: it is done again from its start, and the signal counts after that."""
    try:
        tidy()
    except Interrupted:
        tidy()
        raise
