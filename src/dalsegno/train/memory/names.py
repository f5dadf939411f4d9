"""The names of a run's files in shared memory, and what a run left there.

    dalsegno.<uid>.<run>.<rank>.<slot>        a snapshot of that rank
    dalsegno.<uid>.<run>.<rank>.copy<slot>    the same, kept for a rank of another node
    dalsegno.<uid>.<run>.safe                 the newest step that no single failure takes away

A run's id may hold dots: names are read from their end.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.errors import CheckpointError

FOLDER = Path("/dev/shm")
ALONE = "alone."  # how the id of a training begins that no launcher knows of
_RUN = re.compile(r"[A-Za-z0-9._@+=:-]{1,120}", re.ASCII)
_SLOT = re.compile(r"dalsegno\.([0-9]+)\.(.+)\.([0-9]+)\.(copy)?([0-9]+)", re.ASCII)
_SAFE = re.compile(r"dalsegno\.([0-9]+)\.(.+)\.safe(?:-new)?", re.ASCII)


@dataclass(frozen=True, order=True)
class SlotName:
    """One slot's place: whose, of which run and rank, and whether it is kept for a rank that runs elsewhere."""

    uid: int
    run: str
    rank: int
    slot: int
    copy: bool = False

    def __post_init__(self) -> None:
        check_run(self.run)

    def __str__(self) -> str:
        return f"dalsegno.{self.uid}.{self.run}.{self.rank}.{'copy' if self.copy else ''}{self.slot}"


def check_run(run: str) -> None:
    """A name from outside becomes part of a file's name: nothing in it may lead out of the folder."""
    if not _RUN.fullmatch(run):
        raise CheckpointError(f"{run!r} cannot be a run's id", "letters, digits, dots and dashes")


def parse_slot(name: str) -> SlotName | None:
    """The slot of that file name; None if it is none of ours."""
    found = _SLOT.fullmatch(name)
    if not found or not _RUN.fullmatch(found[2]):
        return None
    return SlotName(int(found[1]), found[2], int(found[3]), int(found[5]), copy=bool(found[4]))


def safe_name(uid: int, run: str) -> str:
    check_run(run)
    return f"dalsegno.{uid}.{run}.safe"


def slots_of(run: str, folder: Path = FOLDER, uid: int | None = None) -> list[SlotName]:
    """Every slot of the run on this machine, copies too, whatever it holds."""
    uid = os.getuid() if uid is None else uid
    found = (parse_slot(name) for name in _listed(folder))
    return sorted(slot for slot in found if slot and (slot.uid, slot.run) == (uid, run))


def left_by(run: str, folder: Path = FOLDER, uid: int | None = None) -> list[Path]:
    """All files of the run in shared memory."""
    uid = os.getuid() if uid is None else uid
    safe = [name for name in _listed(folder) if (kept := _SAFE.fullmatch(name)) and kept.groups() == (str(uid), run)]
    return [folder / str(slot) for slot in slots_of(run, folder, uid)] + [folder / name for name in sorted(safe)]


def sweep(run: str, folder: Path = FOLDER, uid: int | None = None) -> int:
    """Remove what the run left; how many files went. What is gone already, or is somebody else's, is fine."""
    return _remove(left_by(run, folder, uid))


def sweep_rank(run: str, rank: int, folder: Path = FOLDER) -> int:
    """Only what one rank left: others may still need theirs."""
    return _remove([folder / str(slot) for slot in slots_of(run, folder) if slot.rank == rank and not slot.copy])


def forgotten(before: float, folder: Path = FOLDER, uid: int | None = None) -> list[str]:
    """Runs of which no file was written since that time (seconds since 1970)."""
    uid = os.getuid() if uid is None else uid
    return sorted(run for (owner, run), at in last_written(folder).items() if owner == uid and at < before)


def last_written(folder: Path = FOLDER) -> dict[tuple[int, str], float]:
    """Of every user's run: when one of its files was written last (seconds since 1970)."""
    newest: dict[tuple[int, str], float] = {}
    for name in _listed(folder):
        found = _SLOT.fullmatch(name) or _SAFE.fullmatch(name)
        if found and _RUN.fullmatch(found[2]):
            run = int(found[1]), found[2]
            with contextlib.suppress(FileNotFoundError):
                newest[run] = max(newest.get(run, 0.0), (folder / name).lstat().st_mtime)
    return newest


def _remove(paths: list[Path]) -> int:
    gone = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            path.unlink()
            gone += 1
    return gone


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
