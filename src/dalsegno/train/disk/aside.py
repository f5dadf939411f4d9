"""A fresh start that loses nothing: the old checkpoints move into a folder of their own."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime
from pathlib import Path

from dalsegno.train.disk.files import sync_folder, told
from dalsegno.train.disk.names import ASIDE, LATEST
from dalsegno.train.disk.verify import list_steps


def set_aside(folder: Path) -> Path | None:
    """Where they are now; None if there were none. Foreign files stay where they are."""
    with told("cannot set aside the checkpoints in", folder):
        old = list_steps(folder)
        if not old:
            return None
        aside = _new_folder(folder)
        for path in old:
            os.rename(path, aside / path.name)
        if (folder / LATEST).is_symlink():
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder / LATEST, aside / LATEST)
        sync_folder(aside)
        sync_folder(folder)
        return aside


def _new_folder(folder: Path) -> Path:
    name = ASIDE + datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):  # the clock may stand still or go back
        path = folder / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return path
    raise FileExistsError(f"{folder / name}")
