"""The files of one run in a folder of snapshots."""

from __future__ import annotations

import os
from pathlib import Path

from dalsegno.train.memory.files import run_of


def list_run_files(run: str, folder: Path) -> list[str]:
    """Return the names of all files of the run, sorted."""
    return sorted(name for name in os.listdir(folder) if run_of(name) == run)
