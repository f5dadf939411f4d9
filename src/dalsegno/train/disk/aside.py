"""A fresh start that loses nothing: the old checkpoints move into a folder of their own."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime
from pathlib import Path

from dalsegno.train.disk.files import sync_folder, told
from dalsegno.train.disk.names import ASIDE, LATEST, is_of
from dalsegno.train.disk.verify import list_steps, read_manifest


def set_aside(folder: Path, but_of: str = "") -> Path | None:
    """Where they are now; None if there were none. Foreign files stay where they are, and what that run has written."""
    with told("cannot set aside the checkpoints in", folder):
        old = [path for path in list_steps(folder) if not but_of or _is_of_another(path, but_of)]
        if not old:
            return None
        aside = _new_folder(folder)
        for path in old:
            os.rename(path, aside / path.name)
        if _pointed_at(folder) in {path.name for path in old}:
            os.rename(folder / LATEST, aside / LATEST)
        sync_folder(aside)
        sync_folder(folder)
        return aside


def _is_of_another(checkpoint: Path, run: str) -> bool:
    """One that does not say whose it is may be our own, damaged: it stays, for the loader to warn of."""
    try:
        return not is_of(read_manifest(checkpoint).run, run)
    except ValueError:
        return False


def _pointed_at(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(folder / LATEST)
    return ""


def _new_folder(folder: Path) -> Path:
    name = ASIDE + datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):  # the clock may stand still or go back
        path = folder / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return path
    raise FileExistsError(f"{folder / name}")
