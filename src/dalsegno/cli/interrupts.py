"""Handle Ctrl-C, SIGTERM and a lost terminal: end at once, or raise an exception so that the command can clean up."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has no SIGHUP
STOPS = tuple(each for each in (signal.SIGINT, signal.SIGTERM, _HANGUP) if each is not None)
_WORDS = {signal.SIGINT: "interrupted", _HANGUP: "the terminal was closed"}


class Interrupted(KeyboardInterrupt):
    """A request to end this process: Ctrl-C, SIGTERM, or a closed terminal."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number
        self.word = _WORDS.get(signal.Signals(number), "terminated")


def end_at_once() -> None:
    """Let Ctrl-C end the process at once, without a KeyboardInterrupt inside an import."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C in this block, so that unfinished work can be reported."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Interrupted` on Ctrl-C, SIGTERM and a lost terminal in this block, so that the command can clean up.

    A second Ctrl-C or SIGTERM ends the process at once. Under `nohup`, a lost terminal is ignored.
    """
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
        signal.signal(_HANGUP, lambda number, frame: None)  # ignore a second SIGHUP: kernel and shell each send one
        _detach_lost_terminal()
    raise Interrupted(number)


def _detach_lost_terminal() -> None:
    """Redirect output to /dev/null if the terminal is gone: failing writes would stop the cleanup."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        poll = select.poll()
        poll.register(stream, 0)
        if any(event & select.POLLHUP for _, event in poll.poll(0)):
            os.dup2(nowhere, stream)
    os.close(nowhere)


def to_the_end(tidy: Callable[[], None]) -> None:
    """Run `tidy` to its end. If a signal interrupts `tidy`, run it again from the start, then raise `Interrupted`."""
    try:
        tidy()
    except Interrupted:
        tidy()
        raise
