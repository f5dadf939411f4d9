"""The folder that a drill trains in: gone with the drill, or, where that was killed, with the next drill or `down`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DalsegnoError
from dalsegno.system.files import locked, remove_tree

if TYPE_CHECKING:
    from dalsegno.launch.folder import RunFolder

PREFIX = ".drill-"  # the dot: it is no run
LOCK = "lock"  # held for as long as the drill lives, however it ends


@contextmanager
def drill_folder(home: Path) -> Iterator[Path]:
    """Where all nodes see it. It has its name only once it is locked: nobody takes it for a dead drill's."""
    home.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-drill-", dir=home))
    with locked(made / LOCK, "this drill"):
        folder = made.rename(home / made.name.replace(".new-drill-", PREFIX))
        try:
            yield folder
        finally:
            with contextlib.suppress(OSError):
                remove_tree(folder)


def clear_leftovers(home: Path, end: Callable[[RunFolder], None] | None = None) -> None:
    """Remove the folders of drills that were killed. A run that still trains in one is ended first, or keeps it."""
    for folder in home.glob(f"{PREFIX}*"):
        with contextlib.suppress(DalsegnoError, OSError), locked(folder / LOCK, "a drill", wait_s=0.0):
            runs = _training_in(folder, home)
            if end is not None:
                for run in runs:
                    end(run)
            if end is not None or not runs:
                remove_tree(folder)


def _training_in(folder: Path, home: Path) -> list[RunFolder]:
    from dalsegno.cli.last_runs import is_under_way
    from dalsegno.cli.watch import cluster_is_gone
    from dalsegno.jobs import list_runs, read_plan

    under_way = [run for run in list_runs(home) if is_under_way(run) and not cluster_is_gone(run)]
    return [run for run in under_way if folder in Path(read_plan(run).request.chdir).parents]
