"""In a folder one checkpointer of a process is at work: two at once would take each other's saves for their own.

A cell of a notebook that has failed leaves its loop open, and is run again: the newer one goes on.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Protocol


class Ends(Protocol):
    def end(self) -> None: ...


_at_work: weakref.WeakValueDictionary[Path, Ends] = weakref.WeakValueDictionary()


def take_turn(folder: Path, newcomer: Ends) -> None:
    older = _at_work.get(folder)
    if older is not None and older is not newcomer:
        older.end()
    _at_work[folder] = newcomer
