"""Waiting for the parts of all ranks: savers have nothing in common but the folder they write to."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.train.disk.names import Temporary, data_name, failed_name, parse_temporary, part_name
from dalsegno.train.disk.part import Part, parse_part
from dalsegno.train.errors import CheckpointError

_PAUSE_S = 0.02


Abandoned = Callable[[Sequence[int]], bool]


def never(missing: Sequence[int]) -> bool:
    return False


def gather_parts(temporary: Path, world: int, timeout_s: float, abandoned: Abandoned = never) -> list[Part]:
    """The parts of all ranks, as soon as they are there; if they never are, an error that says who failed.

    `abandoned`: whether to wait no longer for these ranks.
    """
    deadline = time.monotonic() + timeout_s
    wanted = {part_name(rank): rank for rank in range(world)}
    while True:
        there = set(os.listdir(temporary))  # opening a folder makes a network file system look again
        if wanted.keys() <= there:
            return [_read(temporary, rank, world) for rank in range(world)]
        _refuse_failed(temporary, there, world)
        missing = sorted(rank for name, rank in wanted.items() if name not in there)
        if abandoned(missing):
            raise CheckpointError(f"the checkpoint was given up while {_ranks(missing)} had not written theirs")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{_ranks(missing)} did not write their share within {timeout_s:g} s",
                hint="do all nodes see the same folder? did a saver die?",
            )
        time.sleep(_PAUSE_S)


def moved_on(folder: Path, ours: Temporary, ranks: Sequence[int]) -> bool:
    """One of these ranks is writing a newer step of the same generation: its share of this one will not come."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            each = parse_temporary(name)
            if each and each[1:] == ours[1:] and each.step > ours.step:
                there = set(os.listdir(folder / name))
                if any(data_name(rank) in there for rank in ranks):
                    return True
    return False


def _read(temporary: Path, rank: int, world: int) -> Part:
    part = parse_part((temporary / part_name(rank)).read_bytes())
    if part.world != world:
        raise CheckpointError(f"rank {rank} wrote its share for {part.world} ranks, but there are {world}")
    size = os.stat(temporary / part.file).st_size
    if size != part.mark.bytes:
        raise CheckpointError(f"{part.file} has {size} bytes, but rank {rank} wrote {part.mark.bytes}")
    return part


def _refuse_failed(temporary: Path, there: set[str], world: int) -> None:
    for rank in range(world):
        if failed_name(rank) in there:
            why = ""
            with contextlib.suppress(OSError):
                why = (temporary / failed_name(rank)).read_text()
            raise CheckpointError(f"rank {rank} could not write its share: {why or 'it did not say why'}")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
