"""Signals that ask for a save: the handler only takes note, so that it cannot break what it interrupts."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Any

ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Wish:
    """Set by the first signal. A second Ctrl-C means at once."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._before: dict[int, Any] = {}

    def listen(self, more: tuple[int, ...] = ()) -> None:
        """Python lets only the main thread listen; elsewhere (some notebooks) signals do what they always did."""
        if threading.current_thread() is threading.main_thread():
            for number in (*ALWAYS, *more):
                self._before[number] = signal.signal(number, self._note)

    def stop_listening(self) -> None:
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError, TypeError):  # another thread's turn; a handler not set from Python
                signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.heard == signal.SIGINT:
            raise KeyboardInterrupt
        self.heard = number
