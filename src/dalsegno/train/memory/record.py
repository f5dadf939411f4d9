"""The two small records at the start of a slot: the commit record and the checksums.

The commit record is written after the contents; the checksums may be added later. Each record has its own checksum and
is written by one call, so that a torn record counts as missing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dalsegno.train.memory.safe_steps import Place, SafeSteps

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
    """The position of a part of the state in the file. The part's head describes its contents."""

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
    """A committed snapshot: its rank, its step, and the positions of its two parts."""

    seq: int  # unique among the snapshots of a slot
    step: int
    generation: int
    rank: int
    world: int
    shared: Extent  # the part that every rank has; ABSENT in a copy of the own part
    own: Extent  # the part that only this rank has
    sharded: bool = False  # whether the own part contains a shard of the model, which no other rank has

    @property
    def place(self) -> tuple[int, int]:
        """The generation and step of the snapshot."""
        return self.generation, self.step

    @property
    def end(self) -> int:
        return max(HEADER, self.shared.end, self.own.end)

    def pack(self) -> bytes:
        fields = (self.seq, self.step, self.generation, self.rank, self.world, self.sharded)
        head = _RECORD.pack(_MAGIC, *fields)
        return _sealed(head + _packed(self.shared) + _packed(self.own))


@dataclass(frozen=True)
class SnapshotSums:
    """The checksums of the two parts of the snapshot with this `seq`."""

    seq: int
    shared: int
    own: int

    def pack(self) -> bytes:
        return _sealed(_SUMS.pack(_SUMS_MAGIC, self.seq, self.shared, self.own))


def parse_record(header: bytes) -> SnapshotRecord | None:
    """Return the record of the slot; None if nothing was committed or the record is damaged."""
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
    """Return whether the header holds checksums that are not a valid record."""
    return any(header[SUMS_AT:HEADER]) and parse_sums(header) is None


def record_of_own_part(record: SnapshotRecord) -> SnapshotRecord:
    """Return the record of a copy with only the rank's own part. The part directly follows the header."""
    return replace(record, shared=ABSENT, own=replace(record.own, at=HEADER))


def record_of_shared_part(record: SnapshotRecord) -> SnapshotRecord:
    """Return the record of a copy with only the shared part. The part directly follows the header."""
    return replace(record, shared=replace(record.shared, at=HEADER), own=ABSENT)


def _packed(extent: Extent) -> bytes:
    return _EXTENT.pack(extent.at, extent.length, extent.head, extent.head_crc)


def _sealed(raw: bytes) -> bytes:
    padded = raw.ljust(_SIZE - _CRC.size, b"\0")
    return padded + _CRC.pack(zlib.crc32(padded))


def _unsealed(raw: bytes, magic: bytes) -> bytes | None:
    whole = len(raw) == _SIZE and raw.startswith(magic) and zlib.crc32(raw[: -_CRC.size]) == _CRC.unpack(raw[-4:])[0]
    return raw if whole else None


# Choice of the next slot


def free_slots(
    slots: Sequence[SnapshotRecord | None], generation: int, resumed: int | None = None, safe: SafeSteps | None = None
) -> list[int]:
    """Return the slots that may be overwritten, best first.

    `safe` comes from the coordinator; it is None without replication. `resumed` is the step from which this generation
    resumed, if any; it is used only without `safe`.
    """
    empty = [number for number, record in enumerate(slots) if record is None]
    full = [(record.place, number) for number, record in enumerate(slots) if record is not None]
    needs = safe.needs if safe else _needs_alone([place for place, _ in full], generation, resumed)
    return empty + [number for place, number in sorted(full) if not needs(place)]


def _needs_alone(places: Sequence[Place], generation: int, resumed: int | None) -> Callable[[Place], bool]:
    """Return the rule for runs without replication: the newest step is needed, and abandoned steps are not."""
    kept = max((step for made_by, step in places if made_by == generation), default=resumed)

    def needs(place: Place) -> bool:
        abandoned = place[0] != generation and (resumed is None or place[1] > resumed)
        return not abandoned and (kept is None or place[1] >= kept)

    return needs
