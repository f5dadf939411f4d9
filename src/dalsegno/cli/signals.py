"""Signals while a run is followed: noted, and answered between two looks, so that no line is cut in half."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Inbox:
    """The signal that came last and has not been answered; 0: none."""

    number: int = 0

    def take(self) -> int:
        number, self.number = self.number, 0
        return number

    def put(self, number: int, _frame: FrameType | None) -> None:
        if self.number:  # the first was not even looked at: we hang, say in a pipe that nobody reads
            raise KeyboardInterrupt
        self.number = number


@contextmanager
def noted(*numbers: int) -> Iterator[Inbox]:
    inbox = Inbox()
    before = {number: signal.signal(number, inbox.put) for number in numbers}
    try:
        yield inbox
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
