"""Rank 0 makes a checkpoint of the shares of all ranks, in an order that leaves a whole one or none at any moment.

data files, fsynced by their ranks → .metadata → MANIFEST.json → fsync of the folder → may we still? → rename to the
final name → fsync of the parent → `latest`.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from dalsegno.train.disk.files import link_durably, remove_tree, sync_folder, told, write_durably
from dalsegno.train.disk.gather import Abandoned, gather_parts, never
from dalsegno.train.disk.manifest import FileMark, Manifest, render
from dalsegno.train.disk.names import LATEST, MANIFEST, METADATA, Temporary, part_name, step_name, trash_name
from dalsegno.train.disk.part import Part
from dalsegno.train.disk.retention import Keep, tidy
from dalsegno.train.disk.stream import ChecksummedFile
from dalsegno.train.disk.verify import faults_of
from dalsegno.train.errors import CheckpointError

Grant = Callable[[], bool]
Warn = Callable[[str], None]


def commit(
    folder: Path,
    step: int,
    world: int,
    run: str,
    generation: int,
    grant: Grant,
    keep: int = 3,
    every: int | None = None,
    timeout_s: float = 600.0,
    abandoned: Abandoned = never,
    warn: Warn = lambda text: None,
) -> Path:
    """Waits for the shares of all ranks and gives the checkpoint's folder. `grant` has the last word.

    What goes wrong before the rename is a CheckpointError and leaves nothing; after it the checkpoint is there, and
    what fails then is only warned of.
    """
    ours = Temporary(step, run, generation)
    temporary, final = folder / ours.name, folder / step_name(step)
    try:
        with told("cannot write the checkpoint", folder):
            parts = gather_parts(temporary, world, timeout_s, abandoned)
            _complete(temporary, ours, parts)
            _ask(grant, ours)
            _put_in_place(temporary, final, step)
    except BaseException:
        remove_tree(temporary)
        raise
    _tell_of_differences(parts, warn)
    _point_latest(folder, final.name, warn)
    tidy(folder, ours, Keep(keep, every), warn)
    return final


def _complete(temporary: Path, ours: Temporary, parts: Sequence[Part]) -> None:
    from dalsegno.train.disk.metadata import merge

    files = {part.file: part.mark for part in parts}
    files[METADATA] = _write_metadata(temporary, merge(parts))
    for part in parts:
        os.unlink(temporary / part_name(part.rank))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest = Manifest(ours.step, len(parts), ours.run, ours.generation, parts[0].torch, now, files)
    write_durably(temporary / MANIFEST, render(manifest).encode())
    sync_folder(temporary)


def _write_metadata(temporary: Path, data: bytes) -> FileMark:
    with ChecksummedFile(temporary / METADATA) as file:
        file.write(data)
        return file.finish()


def _ask(grant: Grant, ours: Temporary) -> None:
    try:
        granted = grant()
    except OSError as error:
        raise CheckpointError(f"step {ours.step} was not committed: nobody to ask for leave: {error}") from error
    if not granted:
        raise CheckpointError(
            f"step {ours.step} was not committed: generation {ours.generation} of {ours.run} is over",
            hint="a newer generation goes on from an earlier step; nothing is to be done",
        )


def _put_in_place(temporary: Path, final: Path, step: int) -> None:
    """A whole checkpoint of the same step stays: it may be read just now, and it is as good as ours."""
    try:
        os.rename(temporary, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if not faults_of(final):
            remove_tree(temporary)
            return
        trash = final.with_name(trash_name(step, uuid.uuid4().hex[:8]))
        os.rename(final, trash)
        os.rename(temporary, final)
        remove_tree(trash)
    sync_folder(final.parent)


def _tell_of_differences(parts: Sequence[Part], warn: Warn) -> None:
    from dalsegno.train.disk.prints import differing

    words = differing(parts)
    if words:
        warn(words)


def _point_latest(folder: Path, name: str, warn: Warn) -> None:
    try:
        link_durably(folder / LATEST, name)
    except OSError as error:  # a file system without links, or something of the user's under that name
        warn(f"{folder / LATEST} does not point at the newest checkpoint, {name}: {error.strerror}")
