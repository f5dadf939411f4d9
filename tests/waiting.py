"""Waiting for what must happen: for the condition itself, never for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# What takes a moment on an idle machine may take a hundred times as long on one with ten times the work it can do.
PATIENCE_S = 60.0


def eventually(true: Callable[[], T], timeout_s: float = PATIENCE_S, every_s: float = 0.05) -> T:
    """Ask until it is true, and give what was found.

    What cannot be looked at yet is not true yet: a file that is not there, a key that nobody has written, a line that
    is only half written. An assertion that fails in between is the end: what it says cannot become true any more.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            if seen := true():
                return seen
            last = repr(seen)
        except (LookupError, OSError, ValueError) as error:
            last = f"{type(error).__name__}: {error}"
        assert time.monotonic() < until, f"did not happen in {timeout_s:g} s; it was last {last}"
        time.sleep(every_s)
