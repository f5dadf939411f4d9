"""A run takes its folder: makes it, keeps other runs out, clears away what would be in its way. One rank does it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dalsegno.train.disk.aside import set_aside
from dalsegno.train.disk.files import told
from dalsegno.train.disk.lock import lock_folder
from dalsegno.train.disk.names import numbered
from dalsegno.train.disk.retention import remove_namesakes

Warn = Callable[[str], None]


class Visitor(NamedTuple):
    """Who opens a folder. A run without a name cannot know what an earlier generation of it has written."""

    run: str
    named: bool
    generation: int  # from 1
    number: int  # of the checkpointer in its process, from 0
    fresh: bool

    @property
    def is_first(self) -> bool:
        """Nothing of this run can be on disk yet."""
        return self.generation <= 1 and self.number == 0


def open_folder(folder: Path, who: Visitor, warn: Warn) -> Path | None:
    """Where a fresh start has put what was there; None if there was nothing, or it stays."""
    with told("cannot make", folder):
        os.makedirs(folder, exist_ok=True)
    lock_folder(folder, who.run, warn)
    remove_namesakes(folder, numbered(who.run, who.number), who.generation)
    if not who.fresh:
        return None
    if who.is_first:
        return set_aside(folder)
    # Whoever came before may have died before it got here; but what this run has written it goes on from.
    return set_aside(folder, but_of=who.run) if who.named or who.generation <= 1 else None
