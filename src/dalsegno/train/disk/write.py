"""A rank's share of a checkpoint: one data file, on the disk, and a part that tells rank 0 what is in it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch

from dalsegno.train.disk.distcp import write_entries
from dalsegno.train.disk.files import remove_tree, told, unlink, write_durably
from dalsegno.train.disk.names import Temporary, data_name, failed_name, part_name
from dalsegno.train.disk.part import Part, render_part
from dalsegno.train.disk.paths import paths_in
from dalsegno.train.disk.prints import prints_of
from dalsegno.train.disk.stream import ChecksummedFile
from dalsegno.train.state import State


def write_share(folder: Path, state: State, run: str, generation: int) -> None:
    """Every rank calls this, in any process; rank 0 then commits. Run and generation together must never come twice.

    What goes wrong is a CheckpointError, and leaves nothing of this rank's behind.
    """
    temporary = folder / Temporary(state.step, run, generation).name
    try:
        with told("cannot write the checkpoint", folder):
            _make(temporary)
            _write(temporary, state)
    except BaseException as error:
        _give_up(temporary, state.rank, error)
        raise


def _make(temporary: Path) -> None:
    """Not its parents: a folder that has vanished may be a mount that is gone, and below it is the wrong disk."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(temporary)


def _write(temporary: Path, state: State) -> None:
    _remove_files(temporary, state.rank)
    name = data_name(state.rank)
    with ChecksummedFile(temporary / name) as file:
        entries = write_entries(file, state)
        mark = file.finish()
    paths = paths_in(state.shell, {*state.values, *(piece.key for piece in state.pieces)}) if state.rank == 0 else {}
    part = Part(state.rank, state.world, name, mark, entries, str(torch.__version__), paths, prints_of(state))
    write_durably(temporary / part_name(state.rank), render_part(part))


def _remove_files(temporary: Path, rank: int) -> None:
    for name in (part_name(rank), failed_name(rank), data_name(rank)):
        unlink(temporary / name)


def _give_up(temporary: Path, rank: int, error: BaseException) -> None:
    """Without rank 0 there is no commit; any other rank tells rank 0 why it need not wait."""
    if rank == 0:
        remove_tree(temporary)
        return
    with contextlib.suppress(OSError):
        _remove_files(temporary, rank)
    with contextlib.suppress(OSError):
        (temporary / failed_name(rank)).write_text(str(error))
