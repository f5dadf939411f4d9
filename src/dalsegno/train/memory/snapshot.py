"""Read snapshots from slots without copying: tensors are views of the mapping.

A file that another user owns or can write to is ignored, because its contents are unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.files import open_own
from dalsegno.train.memory.layout import OWN, SHELL, VALUES, PlacedPiece, aligned, parse_head
from dalsegno.train.memory.record import (
    ABSENT,
    HEADER,
    SUMS_AT,
    Extent,
    SnapshotRecord,
    SnapshotSums,
    parse_record,
    parse_sums,
    record_of_own_part,
    record_of_shared_part,
    sums_are_damaged,
)
from dalsegno.train.memory.slots import Slot, map_to_read
from dalsegno.train.memory.views import view
from dalsegno.train.state import TensorPiece, TrainingState


@dataclass(frozen=True)
class Snapshot:
    """A committed slot, mapped into memory.

    Without a lock, it may be overwritten at any time, so check `still_there`.
    """

    path: Path
    record: SnapshotRecord
    mapping: mmap.mmap  # the whole file

    def part(self, extent: Extent) -> memoryview:
        """Return the bytes of a part, for sending and for checksums."""
        return memoryview(self.mapping)[extent.at : extent.end]

    def still_there(self) -> bool:
        """Return whether the slot still holds the snapshot that was opened."""
        return read_record(self.path) == self.record


def open_snapshot(path: Path) -> Snapshot | None:
    """Open the snapshot in a slot; None if the slot is empty or visibly damaged."""
    fd = open_own(path)
    if fd is None:
        return None
    try:
        return _open(path, fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def hold_snapshot(path: Path) -> Iterator[Snapshot | None]:
    """Open the snapshot and lock it, so that writers skip the slot. Yield None if there is no usable snapshot.

    The lock ends with the `with` block, or with this process.
    """
    fd = open_own(path)
    if fd is None:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        yield _open(path, fd)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # the mapping keeps a duplicate of the descriptor, so closing is not enough
        os.close(fd)


def read_header(path: Path) -> bytes:
    """Return the raw header with both records; empty if there is no such slot."""
    fd = open_own(path)
    if fd is None:
        return b""
    try:
        return os.pread(fd, HEADER, 0)
    finally:
        os.close(fd)


def read_record(path: Path) -> SnapshotRecord | None:
    return parse_record(read_header(path))


def state_of(shared: Snapshot, own: Snapshot | None = None) -> TrainingState:
    """Return the state of a rank. The shared part comes from `shared`, the own part from `own` (default: `shared`)."""
    own = own or shared
    _check_same_state(shared.record, own.record)
    blobs, pieces = _unpack(shared, shared.record.shared)
    own_blobs, own_pieces = _unpack(own, own.record.own)
    in_order = sorted([*pieces, *own_pieces], key=lambda placed: placed[0])
    return TrainingState(
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


def _unpack(snapshot: Snapshot, extent: Extent) -> tuple[dict[str, bytes], list[tuple[int, TensorPiece]]]:
    part, body_at = snapshot.part(extent), aligned(extent.head)
    contents, body = parse_head(bytes(part[: extent.head])), part[body_at:]
    blobs = {blob.name: bytes(body[blob.at : blob.at + blob.length]) for blob in contents.blobs}
    tensors = torch.frombuffer(snapshot.mapping, dtype=torch.uint8)[extent.at + body_at : extent.end]
    return blobs, [(placed.order, _piece(tensors, placed)) for placed in contents.pieces]


def _piece(tensors: torch.Tensor, placed: PlacedPiece) -> TensorPiece:
    return TensorPiece(placed.key, view(tensors, placed), placed.size, placed.offsets, placed.shared, placed.writes)


def _check_same_state(shared: SnapshotRecord, own: SnapshotRecord) -> None:
    """Refuse parts of different states, because two generations may have different values at the same step."""
    if shared.shared == ABSENT:
        raise CheckpointError(f"rank {shared.rank}'s snapshot has no shared part")
    if (shared.step, shared.generation, shared.world) != (own.step, own.generation, own.world):
        raise CheckpointError(
            f"step {shared.step} of generation {shared.generation} and step {own.step} of generation {own.generation}"
            " are not of the same state"
        )


# Checksums. The keeper computes them after the commit; they are checked before a snapshot is used

_CHUNK = 16 << 20


class SnapshotVerdict(Enum):
    WHOLE = "whole"
    UNCHECKED = "committed, not checksummed yet"
    DAMAGED = "damaged"
    NOTHING = "nothing committed"


def checksum(path: Path, threads: int = 2) -> SnapshotSums | None:
    """Write the slot's checksums and return them; None if the slot is empty or was overwritten in the meantime."""
    snapshot = open_snapshot(path)
    if snapshot is None:
        return None
    sums = compute_sums(snapshot, threads)
    fd = open_own(path, os.O_RDWR)
    if fd is None:
        return None
    try:
        if parse_record(os.pread(fd, HEADER, 0)) != snapshot.record:
            return None
        # If a worker overwrites the slot now, these sums have the `seq` of the old snapshot and are ignored.
        os.pwrite(fd, sums.pack(), SUMS_AT)
        return sums
    finally:
        os.close(fd)


def verify(path: Path, threads: int = 2) -> SnapshotVerdict:
    """Check every byte against the checksums and return the verdict."""
    snapshot = open_snapshot(path)
    if snapshot is not None:
        return judge(snapshot, threads)
    return SnapshotVerdict.DAMAGED if any(read_header(path)) else SnapshotVerdict.NOTHING


def judge(snapshot: Snapshot, threads: int = 2) -> SnapshotVerdict:
    """Check every byte of an open snapshot and return the verdict. The snapshot stays mapped and can then be loaded."""
    header = read_header(snapshot.path)
    if parse_record(header) != snapshot.record:
        return SnapshotVerdict.NOTHING  # the snapshot was overwritten in the meantime
    if sums_are_damaged(header):
        return SnapshotVerdict.DAMAGED
    sums = parse_sums(header)
    if sums is None or sums.seq != snapshot.record.seq:
        return SnapshotVerdict.UNCHECKED
    return SnapshotVerdict.WHOLE if compute_sums(snapshot, threads) == sums else SnapshotVerdict.DAMAGED


def compute_sums(snapshot: Snapshot, threads: int = 2) -> SnapshotSums:
    record: SnapshotRecord = snapshot.record
    shared, own = (compute_sum(snapshot.part(extent), threads) for extent in (record.shared, record.own))
    return SnapshotSums(record.seq, shared, own)


def compute_sum(part: memoryview, threads: int = 2) -> int:
    """Compute the checksums of the part's chunks in parallel, and return the checksum of these checksums."""
    chunks = [part[at : at + _CHUNK] for at in range(0, len(part), _CHUNK)]
    if len(chunks) < 2 or threads < 2:
        return _combine(map(zlib.crc32, chunks))
    with ThreadPoolExecutor(threads) as pool:
        return _combine(pool.map(zlib.crc32, chunks))


def _combine(sums: Iterable[int]) -> int:
    return zlib.crc32(b"".join(one.to_bytes(4, "little") for one in sums))


# Copies for other nodes


def pack_part(snapshot: Snapshot, sums: SnapshotSums | None = None, shared: bool = False) -> tuple[bytes, memoryview]:
    """Return the header with the checksum, and the bytes to send.

    These are the rank's own part or, if `shared` is set, the part that is the same on all ranks.
    """
    record, whole = _of_part(snapshot.record, shared), snapshot.record
    part = snapshot.part(whole.shared if shared else whole.own)
    known = None if sums is None else sums.shared if shared else sums.own
    crc = compute_sum(part) if known is None else known
    return record.pack() + (
        SnapshotSums(record.seq, crc, 0) if shared else SnapshotSums(record.seq, 0, crc)
    ).pack(), part


class Incoming:
    """A copy being received: fill `buffer`, then commit. Until then the slot is empty."""

    def __init__(self, path: Path, header: bytes) -> None:
        record, sums = parse_record(header), parse_sums(header)
        if record is None or sums is None or not _is_one_part(record):
            raise CheckpointError(f"the data sent for {path.name} is not a copy of a snapshot")
        self.record, self._sums, self._slot = record, sums, Slot(path)
        self._slot.make_fit(record.end)
        if not self._slot.begin():
            self._slot.close()
            raise CheckpointError(f"{path.name} is being read", "send it again later")

    @property
    def buffer(self) -> memoryview:
        return self._slot.buffer[HEADER : self.record.end]

    def is_whole(self) -> bool:
        """Return whether the bytes match the sender's checksum."""
        sent = self._sums.own if self.record.shared == ABSENT else self._sums.shared
        return compute_sum(self.buffer) == sent

    def commit(self) -> None:
        """Commit the copy with the sender's checksum."""
        self._slot.commit(self.record, self._sums)
        self._slot.close()

    def abandon(self) -> None:
        """Close the slot without a commit; it stays empty."""
        self._slot.close()


def _of_part(record: SnapshotRecord, shared: bool) -> SnapshotRecord:
    return record_of_shared_part(record) if shared else record_of_own_part(record)


def _is_one_part(record: SnapshotRecord) -> bool:
    shared = record.own == ABSENT
    return record == _of_part(record, shared) and record.end > HEADER
