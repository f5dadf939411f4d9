"""Ctrl-C: while nothing is under way it simply ends us; while work is done, the work is told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # 128 and SIGINT, as a shell tells it


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
