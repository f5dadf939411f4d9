"""The names of a run's files in its user's folder in shared memory, and what a run left there.

    <run>.<rank>.<slot>        a snapshot of that rank
    <run>.<rank>.copy<slot>    the same, kept for a rank of another node
    <run>.<rank>.alive         locked as long as a training lives that has no agent (`alive`)
    <run>.safe                 the newest step that no single failure takes away

A run's id may hold dots: names are read from their end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory import owned

ALONE = "alone."  # how the id of a training begins that no launcher knows of
_RUN = re.compile(r"[A-Za-z0-9._@+=:-]{1,120}", re.ASCII)
_SLOT = re.compile(r"(.+)\.([0-9]+)\.(copy)?([0-9]+)", re.ASCII)
_ALIVE = re.compile(r"(.+)\.([0-9]+)\.alive", re.ASCII)
_SAFE = re.compile(r"(.+)\.safe(?:-new)?", re.ASCII)


@dataclass(frozen=True, order=True)
class SlotName:
    """One slot's place: of which run and rank, and whether it is kept for a rank that runs elsewhere."""

    run: str
    rank: int
    slot: int
    copy: bool = False

    def __post_init__(self) -> None:
        check_run(self.run)

    def __str__(self) -> str:
        return f"{self.run}.{self.rank}.{'copy' if self.copy else ''}{self.slot}"


def check_run(run: str) -> None:
    """A name from outside becomes part of a file's name: nothing in it may lead out of the folder."""
    if not _RUN.fullmatch(run):
        raise CheckpointError(f"{run!r} cannot be a run's id", "letters, digits, dots and dashes")


def parse_slot(name: str) -> SlotName | None:
    """The slot of that file name; None if it is none of ours."""
    found = _SLOT.fullmatch(name)
    if not found or not _RUN.fullmatch(found[1]):
        return None
    return SlotName(found[1], int(found[2]), int(found[4]), copy=bool(found[3]))


def safe_name(run: str) -> str:
    check_run(run)
    return f"{run}.safe"


def alive_name(run: str, rank: int) -> str:
    check_run(run)
    return f"{run}.{rank}.alive"


def parse_alive(name: str) -> tuple[str, int] | None:
    """The run and rank of the file that tells whether they live; None if it is no such file."""
    found = _ALIVE.fullmatch(name)
    return (found[1], int(found[2])) if found and _RUN.fullmatch(found[1]) else None


def slots_of(run: str, folder: Path | None = None) -> list[SlotName]:
    """Every slot of the run in this user's folder, copies too, whatever it holds."""
    found = (parse_slot(name) for name in _listed(folder, os.getuid()))
    return sorted(slot for slot in found if slot and slot.run == run)


def left_by(run: str, folder: Path | None = None, uid: int | None = None) -> list[str]:
    """The names of all files of the run in the user's folder."""
    return sorted(name for name in _listed(folder, os.getuid() if uid is None else uid) if run_of(name) == run)


def sweep(run: str, folder: Path | None = None, uid: int | None = None) -> int:
    """Remove what the run left in the user's folder; how many files went. What is gone already is fine."""
    uid = os.getuid() if uid is None else uid
    folder = folder or owned.find_folder(uid=uid)
    return sweep_all({run}, folder, uid) if folder else 0


def sweep_all(runs: Collection[str], folder: Path, uid: int) -> int:
    """The same for many runs, at the price of one."""
    gone = owned.remove_from(folder, [name for name in _listed(folder, uid) if run_of(name) in runs], uid)
    if gone:
        owned.remove_folder(folder)
    return gone


def sweep_rank(run: str, rank: int, folder: Path | None = None) -> int:
    """Only what one rank left: others may still need theirs."""
    folder = folder or owned.find_folder()
    if folder is None:
        return 0
    slots = [str(slot) for slot in slots_of(run, folder) if slot.rank == rank and not slot.copy]
    gone = owned.remove_from(folder, [*slots, alive_name(run, rank)], os.getuid())
    owned.remove_folder(folder)
    return gone


def forgotten(before: float, folder: Path | None = None) -> list[str]:
    """Runs of this user's of which no file was written since that time (seconds since 1970)."""
    return sorted(run for run, at in last_written(folder, os.getuid()).items() if at < before)


def last_written(folder: Path | None, uid: int) -> dict[str, float]:
    """Of every run in the user's folder: when one of its files was written last (seconds since 1970)."""
    newest: dict[str, float] = {}
    for name, at in _listed(folder, uid).items():
        run = run_of(name)
        if run is not None:
            newest[run] = max(newest.get(run, 0.0), at)
    return newest


def run_of(name: str) -> str | None:
    """The run that a file of that name belongs to; None if it is none of ours."""
    found = _SLOT.fullmatch(name) or _ALIVE.fullmatch(name) or _SAFE.fullmatch(name)
    return found[1] if found and _RUN.fullmatch(found[1]) else None


def _listed(folder: Path | None, uid: int) -> dict[str, float]:
    folder = folder or owned.find_folder(uid=uid)
    return owned.list_folder(folder, uid) if folder else {}
