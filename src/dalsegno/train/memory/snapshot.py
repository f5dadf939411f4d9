"""Reading what slots hold: nothing is copied, tensors are views of the mapping.

A file that another user made or may write is as good as none: what is read here is unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.layout import OWN, SHELL, VALUES, Placed, aligned, parse_head
from dalsegno.train.memory.owned import open_own
from dalsegno.train.memory.record import ABSENT, HEADER, Extent, Record, parse_record
from dalsegno.train.memory.segment import map_to_read
from dalsegno.train.memory.views import view
from dalsegno.train.state import Piece, State


@dataclass(frozen=True)
class Snapshot:
    """A committed slot, mapped. It may be overwritten under a reader that does not hold it: ask `still_there`."""

    path: Path
    record: Record
    mapping: mmap.mmap  # the whole file

    def part(self, extent: Extent) -> memoryview:
        """A part's bytes, as they are sent and checked."""
        return memoryview(self.mapping)[extent.at : extent.end]

    def still_there(self) -> bool:
        """Whether the slot holds what it held when this was opened."""
        return read_record(self.path) == self.record


def open_snapshot(path: Path) -> Snapshot | None:
    """What the slot holds; None if that is nothing, or it is visibly damaged."""
    fd = open_own(path)
    if fd is None:
        return None
    try:
        return _open(path, fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def held_snapshot(path: Path) -> Iterator[Snapshot | None]:
    """The same, and nobody overwrites it meanwhile: that snapshot is skipped. The hold ends with this process."""
    fd = open_own(path)
    if fd is None:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield _open(path, fd)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # the mapping has a copy of the handle: closing this one would not be enough
        os.close(fd)


def read_header(path: Path) -> bytes:
    """Both records as they lie there; empty if there is no such slot."""
    fd = open_own(path)
    if fd is None:
        return b""
    try:
        return os.pread(fd, HEADER, 0)
    finally:
        os.close(fd)


def read_record(path: Path) -> Record | None:
    return parse_record(read_header(path))


def state_of(shared: Snapshot, own: Snapshot | None = None) -> State:
    """The state of `own`'s rank, with what all ranks have from `shared`; without `own`, the one of a single slot."""
    own = own or shared
    _check_they_belong_together(shared.record, own.record)
    blobs, pieces = _taken(shared, shared.record.shared)
    own_blobs, own_pieces = _taken(own, own.record.own)
    in_order = sorted([*pieces, *own_pieces], key=lambda placed: placed[0])
    return State(
        step=own.record.step,
        rank=own.record.rank,
        world=own.record.world,
        pieces=tuple(piece for _, piece in in_order),
        shell=blobs[SHELL],
        own=own_blobs[OWN],
        values=pickle.loads(blobs[VALUES]),
    )


def _open(path: Path, fd: int) -> Snapshot | None:
    record = parse_record(os.pread(fd, HEADER, 0))
    if record is None or record.end > os.fstat(fd).st_size:
        return None
    snapshot = Snapshot(path, record, map_to_read(fd))
    heads_are_whole = all(_head_is_whole(snapshot, extent) for extent in (record.shared, record.own))
    return snapshot if heads_are_whole else None


def _head_is_whole(snapshot: Snapshot, extent: Extent) -> bool:
    return extent == ABSENT or zlib.crc32(snapshot.part(extent)[: extent.head]) == extent.head_crc


def _taken(snapshot: Snapshot, extent: Extent) -> tuple[dict[str, bytes], list[tuple[int, Piece]]]:
    part, body_at = snapshot.part(extent), aligned(extent.head)
    contents, body = parse_head(bytes(part[: extent.head])), part[body_at:]
    blobs = {blob.name: bytes(body[blob.at : blob.at + blob.length]) for blob in contents.blobs}
    tensors = torch.frombuffer(snapshot.mapping, dtype=torch.uint8)[extent.at + body_at : extent.end]
    return blobs, [(placed.order, _piece(tensors, placed)) for placed in contents.pieces]


def _piece(tensors: torch.Tensor, placed: Placed) -> Piece:
    return Piece(placed.key, view(tensors, placed), placed.size, placed.offsets, placed.shared, placed.writes)


def _check_they_belong_together(shared: Record, own: Record) -> None:
    """Two generations may both have been at a step, with different values: never mix them."""
    if shared.shared == ABSENT:
        raise CheckpointError(f"rank {shared.rank}'s snapshot holds only what is its own")
    if (shared.step, shared.generation, shared.world) != (own.step, own.generation, own.world):
        raise CheckpointError(
            f"step {shared.step} of generation {shared.generation} and step {own.step} of generation {own.generation}"
            " are not of one state"
        )
