"""The two small records at the start of a slot: what it holds (written last), and its checksums (written later).

Each bears its own checksum and is written by one call: a torn one is as good as none.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dalsegno.train.memory.safe import Place, Safe

_SIZE = 256
COMMIT_AT, SUMS_AT, HEADER = 0, _SIZE, 2 * _SIZE
NOTHING = bytes(HEADER)
_EXTENT = struct.Struct("<QQQI")
_RECORD = struct.Struct("<8sQqIII?")
_SUMS = struct.Struct("<8sQII")
_CRC = struct.Struct("<I")
_MAGIC, _SUMS_MAGIC = b"dalsegn1", b"dalsums1"


@dataclass(frozen=True)
class Extent:
    """Where a part of the state lies in the file. Its head says what is in it."""

    at: int
    length: int
    head: int  # length of the head
    head_crc: int

    @property
    def end(self) -> int:
        return self.at + self.length


ABSENT = Extent(0, 0, 0, 0)


@dataclass(frozen=True)
class SnapshotRecord:
    """A committed snapshot: whose, of which step, and where its two parts are."""

    seq: int  # differs between any two snapshots of a slot
    step: int
    generation: int
    rank: int
    world: int
    shared: Extent  # what every rank has; ABSENT in a copy of the other part
    own: Extent  # what only this rank has
    sharded: bool = False  # and that is a part of the model: no other rank's serves in its place

    @property
    def place(self) -> tuple[int, int]:
        """When it was made, in the run's history."""
        return self.generation, self.step

    @property
    def end(self) -> int:
        return max(HEADER, self.shared.end, self.own.end)

    def pack(self) -> bytes:
        about = (self.seq, self.step, self.generation, self.rank, self.world, self.sharded)
        head = _RECORD.pack(_MAGIC, *about)
        return _sealed(head + _packed(self.shared) + _packed(self.own))


@dataclass(frozen=True)
class SnapshotSums:
    """Checksums of the two parts of the snapshot with this `seq`."""

    seq: int
    shared: int
    own: int

    def pack(self) -> bytes:
        return _sealed(_SUMS.pack(_SUMS_MAGIC, self.seq, self.shared, self.own))


def parse_record(header: bytes) -> SnapshotRecord | None:
    """What the slot holds; None if nothing was committed, or the record is damaged."""
    raw = _unsealed(header[COMMIT_AT:SUMS_AT], _MAGIC)
    if raw is None:
        return None
    _, seq, step, generation, rank, world, sharded = _RECORD.unpack_from(raw)
    shared, own = (Extent(*_EXTENT.unpack_from(raw, _RECORD.size + n * _EXTENT.size)) for n in range(2))
    return SnapshotRecord(seq, step, generation, rank, world, shared, own, sharded)


def parse_sums(header: bytes) -> SnapshotSums | None:
    raw = _unsealed(header[SUMS_AT:HEADER], _SUMS_MAGIC)
    return None if raw is None else SnapshotSums(*_SUMS.unpack_from(raw)[1:])


def sums_are_damaged(header: bytes) -> bool:
    """Something was written there, but it is no whole record."""
    return any(header[SUMS_AT:HEADER]) and parse_sums(header) is None


def of_own_part(record: SnapshotRecord) -> SnapshotRecord:
    """The record of a copy that holds the own part alone, at the start of its file."""
    return replace(record, shared=ABSENT, own=replace(record.own, at=HEADER))


def of_shared_part(record: SnapshotRecord) -> SnapshotRecord:
    """The same for what every rank has."""
    return replace(record, shared=replace(record.shared, at=HEADER), own=ABSENT)


def _packed(extent: Extent) -> bytes:
    return _EXTENT.pack(extent.at, extent.length, extent.head, extent.head_crc)


def _sealed(raw: bytes) -> bytes:
    padded = raw.ljust(_SIZE - _CRC.size, b"\0")
    return padded + _CRC.pack(zlib.crc32(padded))


def _unsealed(raw: bytes, magic: bytes) -> bytes | None:
    whole = len(raw) == _SIZE and raw.startswith(magic) and zlib.crc32(raw[: -_CRC.size]) == _CRC.unpack(raw[-4:])[0]
    return raw if whole else None


# ---- Which slot the next snapshot goes into. Pure.


def free_slots(
    slots: Sequence[SnapshotRecord | None], generation: int, resumed: int | None = None, safe: Safe | None = None
) -> list[int]:
    """Slots that may be overwritten, the best first.

    `safe`: what the coordinator says of it; None where nobody replicates. Then `resumed` counts, the step this
    generation started from, if it did not start anew.
    """
    empty = [number for number, record in enumerate(slots) if record is None]
    full = [(record.place, number) for number, record in enumerate(slots) if record is not None]
    needs = safe.needs if safe else _needs_alone([place for place, _ in full], generation, resumed)
    return empty + [number for place, number in sorted(full) if not needs(place)]


def _needs_alone(places: Sequence[Place], generation: int, resumed: int | None) -> Callable[[Place], bool]:
    """For whoever has no other node: the newest is kept, and not the steps that an earlier generation gave up."""
    kept = max((step for made_by, step in places if made_by == generation), default=resumed)

    def needs(place: Place) -> bool:
        given_up = place[0] != generation and (resumed is None or place[1] > resumed)
        return not given_up and (kept is None or place[1] >= kept)

    return needs
