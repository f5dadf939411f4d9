"""All ranks find the same checkpoint, and together read every byte of it once: one rank alone would read for hours."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from dalsegno.train.board import Board
from dalsegno.train.disk.load import Found, newest_but, none_is_whole, open_checkpoint
from dalsegno.train.disk.verify import byte_faults
from dalsegno.train.errors import CheckpointError

Warn = Callable[[str], None]


def find_together(folder: Path, board: Board, rank: int, world: int, warn: Warn) -> Found | None:
    """The newest one that is whole, held by every rank; damaged ones are told of by the first, and passed over."""
    damaged: list[str] = []
    for attempt in itertools.count():
        first = _look(folder, damaged, warn) if rank == 0 else None
        name, error = board.gather(f"disk {attempt}", _told(first))[0]
        if error:
            raise CheckpointError(*error)
        if name is None:
            return None
        found, faults = _read_share(first, folder / name, rank, world)
        everyones = sorted({fault for each in board.gather(f"faults {attempt}", faults) for fault in each})
        if found is not None and not everyones:
            return found
        if found is not None:
            found.close()
        damaged.append(name)
        if rank == 0:
            warn(f"{folder / name} is damaged and passed over: {'; '.join(everyones)}")
    return None


def _look(folder: Path, damaged: list[str], warn: Warn) -> Found | CheckpointError | None:
    """By sizes alone. What is wrong with the folder all ranks are to hear."""
    try:
        found = newest_but(damaged, folder, warn)
    except CheckpointError as error:
        return error
    return none_is_whole(folder, damaged) if found is None and damaged else found


def _told(found: Found | CheckpointError | None) -> tuple[str | None, tuple[str, str] | None]:
    if isinstance(found, CheckpointError):
        return None, (found.what, found.hint)
    return (found.path.name if found else None), None


def _read_share(
    found: Found | CheckpointError | None, path: Path, rank: int, world: int
) -> tuple[Found | None, list[str]]:
    try:
        mine = found if isinstance(found, Found) else open_checkpoint(path, every_byte=False)
    except CheckpointError as error:
        return None, [f"rank {rank}: {error}"]
    return mine, byte_faults(mine.path, dict(sorted(mine.manifest.files.items())[rank::world]))
