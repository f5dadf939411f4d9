"""Signals that ask for a save: the handler only takes note, so that it cannot break what it interrupts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class SaveWish:
    """Set by the first signal. A second Ctrl-C means at once."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def listen(self, more: tuple[int, ...] = ()) -> None:
        """Python lets only the main thread listen; elsewhere (some notebooks) signals do what they always did."""
        if threading.current_thread() is threading.main_thread():
            os.register_at_fork(after_in_child=self._begin_in_child)
            for number in (*ALWAYS, *more):
                self._before[number] = signal.signal(number, self._note)

    def stop_listening(self) -> None:
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError, TypeError):  # another thread's turn; a handler not set from Python
                signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        if number == signal.SIGINT and self.heard == signal.SIGINT:
            raise KeyboardInterrupt
        self.heard = number

    def _begin_in_child(self) -> None:
        """Forked from the script. A Ctrl-C reaches those that load its data too: they go on, the step in flight needs
        them. Told to end, a child ends as if we had never listened: at once, even if it is just about to wait."""
        if signal.SIGTERM in self._before:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


# ---- In a folder one checkpointer of a process is at work: two at once would take each other's saves for their
# own.


class Ends(Protocol):
    def end(self) -> None: ...


_at_work: weakref.WeakValueDictionary[Path, Ends] = weakref.WeakValueDictionary()


def take_turn(folder: Path, newcomer: Ends) -> None:
    older = _at_work.get(folder)
    if older is not None and older is not newcomer:
        older.end()
    _at_work[folder] = newcomer
