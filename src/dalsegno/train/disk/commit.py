"""Commit a checkpoint on rank 0, after all ranks have written their shares.

At any moment, the checkpoint is complete or absent. The order is: data files, fsynced by their ranks → .metadata →
MANIFEST.json → fsync of the folder → ask for permission → rename to the final name → fsync of the parent → `latest`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pickle
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dalsegno.train.disk.files import (
    ChecksummedFile,
    link_durably,
    remove_tree,
    report_disk_errors,
    sync_folder,
    write_durably,
)
from dalsegno.train.disk.folder import Retention, tidy
from dalsegno.train.disk.format import (
    LATEST,
    MANIFEST,
    METADATA,
    CheckpointManifest,
    Chunk,
    DataEntry,
    FileMark,
    RankPart,
    TemporaryName,
    data_name,
    failed_name,
    parse_part,
    parse_temporary,
    part_name,
    render,
    step_name,
    trash_name,
)
from dalsegno.train.disk.verify import faults_of, list_steps, read_manifest
from dalsegno.train.errors import CheckpointError

# The parts: each describes one rank's share. The savers communicate only through the folder that they write to

_PAUSE_S = 0.02


Abandoned = Callable[[Sequence[int]], bool]


def never(missing: Sequence[int]) -> bool:
    return False


def gather_parts(temporary: Path, world: int, timeout_s: float, abandoned: Abandoned = never) -> list[RankPart]:
    """Wait for the parts of all ranks and return them.

    Raise CheckpointError if a rank fails or the time is over; the error names the ranks. `abandoned` is called with the
    missing ranks and returns whether to stop waiting for them.
    """
    deadline = time.monotonic() + timeout_s
    wanted = {part_name(rank): rank for rank in range(world)}
    while True:
        there = set(os.listdir(temporary))  # opening a folder makes a network file system refresh it
        if wanted.keys() <= there:
            return [_read(temporary, rank, world) for rank in range(world)]
        _refuse_failed(temporary, there, world)
        missing = sorted(rank for name, rank in wanted.items() if name not in there)
        if abandoned(missing):
            raise CheckpointError(f"the checkpoint was abandoned before {_ranks(missing)} had written their share")
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{_ranks(missing)} did not write their share within {timeout_s:g} s",
                hint="check that all nodes see the same folder, and that no saver has died",
            )
        time.sleep(_PAUSE_S)


def has_moved_on(folder: Path, ours: TemporaryName, ranks: Sequence[int]) -> bool:
    """Return whether one of these ranks is already writing a newer step, and so will never write this one."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            each = parse_temporary(name)
            if each and each[1:] == ours[1:] and each.step > ours.step:
                there = set(os.listdir(folder / name))
                if any(data_name(rank) in there for rank in ranks):
                    return True
    return False


def _read(temporary: Path, rank: int, world: int) -> RankPart:
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
            raise CheckpointError(f"rank {rank} could not write its share: {why or 'no reason given'}")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


# Commit of a checkpoint

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
    verified: int | None = None,
    timeout_s: float = 600.0,
    abandoned: Abandoned = never,
    warn: Warn = lambda text: None,
) -> Path:
    """Wait for the shares of all ranks, commit, and return the checkpoint's folder.

    `grant` returns whether the rename is allowed.

    A failure before the rename raises CheckpointError and leaves nothing behind. After the rename the checkpoint
    exists, and a failure is only a warning.
    """
    ours = TemporaryName(step, run, generation)
    temporary, final = folder / ours.name, folder / step_name(step)
    try:
        with report_disk_errors("cannot write the checkpoint", folder):
            parts = gather_parts(temporary, world, timeout_s, abandoned)
            _complete(temporary, ours, parts)
            _ask(grant, ours)
            _put_in_place(temporary, final, step)
    except BaseException:
        remove_tree(temporary)
        raise
    _warn_of_differences(parts, warn)
    _point_latest(folder, ours, final.name, warn)
    tidy(folder, ours, Retention(keep, every, verified), warn)
    return final


def _complete(temporary: Path, ours: TemporaryName, parts: Sequence[RankPart]) -> None:
    files = {part.file: part.mark for part in parts}
    files[METADATA] = _write_metadata(temporary, merge(parts))
    for part in parts:
        os.unlink(temporary / part_name(part.rank))
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    manifest = CheckpointManifest(ours.step, len(parts), ours.run, ours.generation, parts[0].torch, now, files)
    write_durably(temporary / MANIFEST, render(manifest).encode())
    sync_folder(temporary)


def _write_metadata(temporary: Path, data: bytes) -> FileMark:
    with ChecksummedFile(temporary / METADATA) as file:
        file.write(data)
        return file.finish()


def _ask(grant: Grant, ours: TemporaryName) -> None:
    try:
        granted = grant()
    except OSError as error:
        raise CheckpointError(
            f"step {ours.step} was not committed: no answer to the request for permission: {error}"
        ) from error
    if not granted:
        raise CheckpointError(
            f"step {ours.step} was not committed: generation {ours.generation} of {ours.run} is over",
            hint="nothing to do: a newer generation resumes from an earlier step",
        )


def _put_in_place(temporary: Path, final: Path, step: int) -> None:
    """Rename the folder to its final name.

    An intact checkpoint of the same step may be in use. It is kept, and the new one is removed. A damaged one is
    replaced.
    """
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


def _warn_of_differences(parts: Sequence[RankPart], warn: Warn) -> None:
    from dalsegno.train.disk.write import describe_difference

    difference = describe_difference(parts)
    if difference:
        warn(difference)


def _point_latest(folder: Path, ours: TemporaryName, name: str, warn: Warn) -> None:
    """Point `latest` at this checkpoint, or at a later one of this generation from a concurrent save."""
    try:
        link_durably(folder / LATEST, name)
        newest = _newest_of_generation(folder, ours)
        if newest != name:  # a later step was committed in the meantime, and `latest` must point at it
            link_durably(folder / LATEST, newest)
    except OSError as error:  # the file system has no links, or the user has a file with that name
        warn(f"{folder / LATEST} does not point at the newest checkpoint, {name}: {error.strerror}")


def _newest_of_generation(folder: Path, ours: TemporaryName) -> str:
    for path in list_steps(folder):
        with contextlib.suppress(ValueError):
            manifest = read_manifest(path)
            if manifest.step >= ours.step and (manifest.run, manifest.generation) == (ours.run, ours.generation):
                return path.name
    return step_name(ours.step)


# `.metadata`, by which torch.distributed.checkpoint finds every tensor


def merge(parts: Sequence[RankPart]) -> bytes:
    """Return the `.metadata` that covers all parts.

    Refuse a tensor that is incomplete, or whose size or type varies by rank.
    """
    items: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for part in sorted(parts, key=lambda part: part.rank):
        for entry in part.entries:
            _add(items, places, entry, part.file)
    _refuse_gaps(items)
    metadata = Metadata(items, planner_data=_paths(parts, items), storage_data=places)
    metadata.version = "1.0.0"  # version of DCP's format; older versions of torch lack the field
    return pickle.dumps(metadata)


def _add(items: dict[str, Any], places: dict[MetadataIndex, _StorageInfo], entry: DataEntry, file: str) -> None:
    chunk = entry.chunk
    index = MetadataIndex(entry.key, chunk.offsets if chunk else None)
    if index in places:
        return  # hybrid sharding: another rank wrote the same chunk
    places[index] = _StorageInfo(file, entry.at, entry.length)
    if chunk is None:
        items[entry.key] = BytesStorageMetadata()
        return
    known = items.setdefault(entry.key, _tensor(chunk))
    if (known.size, known.properties.dtype) != (torch.Size(chunk.size), _dtype(chunk)):
        raise CheckpointError(f"the ranks disagree on the size or type of {entry.key}")
    known.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))


def _tensor(chunk: Chunk) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=_dtype(chunk)), torch.Size(chunk.size), [])


def _dtype(chunk: Chunk) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, chunk.dtype)
    return dtype


def _refuse_gaps(items: dict[str, Any]) -> None:
    for key, item in items.items():
        if isinstance(item, TensorStorageMetadata):
            written = sum(math.prod(chunk.sizes) for chunk in item.chunks)
            if written != math.prod(item.size):
                raise CheckpointError(f"the ranks wrote {written} of the {math.prod(item.size)} elements of {key}")


def _paths(parts: Sequence[RankPart], items: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the path of each key in the nested state. A key with an unknown path is split at its first dot."""
    known = {key: tuple(path) for part in parts for key, path in part.paths.items()}
    return {key: known.get(key) or tuple(key.split(".", 1)) for key in items}
