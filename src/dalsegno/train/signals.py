"""Signals that ask for a save: the handler only takes note, so that it cannot break what it interrupts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Wish:
    """Set by the first signal. A second Ctrl-C means at once."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._process = os.getpid()
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
        if os.getpid() != self._process:
            self._note_in_child(number)
            return
        if number == signal.SIGINT and self.heard == signal.SIGINT:
            raise KeyboardInterrupt
        self.heard = number

    def _note_in_child(self, number: int) -> None:
        """Forked from the script. A Ctrl-C reaches those that load its data too: they go on, the step in flight needs
        them. Told to end, a child ends as if we had never listened."""
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
