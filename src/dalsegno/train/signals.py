"""Signals that ask the script to save and stop. The handler only sets a flag, so it may interrupt any code."""

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


class SaveSignal:
    """The last signal received. A second Ctrl-C interrupts the script at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._process = os.getpid()
        self._before: dict[int, Any] = {}

    def listen(self, more: tuple[int, ...] = ()) -> None:
        """Install the handlers, if this is the main thread.

        Python does not allow this in other threads, which some notebooks use.
        """
        if threading.current_thread() is threading.main_thread():
            os.register_at_fork(after_in_child=self._begin_in_child)
            for number in (*ALWAYS, *more):
                self._before[number] = signal.signal(number, self._note)

    def stop_listening(self) -> None:
        for number, handler in self._before.items():
            # This fails outside the main thread, or if the old handler was not set from Python.
            with contextlib.suppress(ValueError, TypeError):
                signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def _begin_in_child(self) -> None:
        """Restore the default action of SIGTERM in a child process of the script, so that the child ends at once.

        SIGINT stays ignored in the child, because Ctrl-C also reaches data loaders, which the current step needs.
        """
        if signal.SIGTERM in self._before:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


# One active Checkpointer per folder and process, because two would disturb each other's saves


class CanEnd(Protocol):
    def end(self) -> None: ...


_at_work: weakref.WeakValueDictionary[Path, CanEnd] = weakref.WeakValueDictionary()


def replace_active(folder: Path, newcomer: CanEnd) -> None:
    older = _at_work.get(folder)
    if older is not None and older is not newcomer:
        older.end()
    _at_work[folder] = newcomer
