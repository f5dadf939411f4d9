"""A part of a snapshot, as it goes to another node and is kept there.

What is sent is what the copy's file will hold: its header, then the part.
"""

from __future__ import annotations

from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.checksum import sum_of
from dalsegno.train.memory.record import (
    ABSENT,
    HEADER,
    Record,
    Sums,
    of_own_part,
    of_shared_part,
    parse_record,
    parse_sums,
)
from dalsegno.train.memory.slot import Slot
from dalsegno.train.memory.snapshot import Snapshot


def outgoing(snapshot: Snapshot, sums: Sums | None = None, shared: bool = False) -> tuple[bytes, memoryview]:
    """Header and bytes to send: the rank's own part, or the one that every rank has. Its checksum goes with it."""
    record, whole = _of_part(snapshot.record, shared), snapshot.record
    part = snapshot.part(whole.shared if shared else whole.own)
    known = None if sums is None else sums.shared if shared else sums.own
    crc = sum_of(part) if known is None else known
    return record.pack() + (Sums(record.seq, crc, 0) if shared else Sums(record.seq, 0, crc)).pack(), part


class Incoming:
    """A copy on its way in: fill `buffer`, then commit. Until then the slot holds nothing."""

    def __init__(self, path: Path, header: bytes) -> None:
        record, sums = parse_record(header), parse_sums(header)
        if record is None or sums is None or not _is_one_part(record):
            raise CheckpointError(f"what was sent for {path.name} is no copy of a snapshot")
        self.record, self._sums, self._slot = record, sums, Slot(path)
        self._slot.make_fit(record.end)
        if not self._slot.begin():
            self._slot.close()
            raise CheckpointError(f"{path.name} is being read", "send it again later")

    @property
    def buffer(self) -> memoryview:
        return self._slot.buffer[HEADER : self.record.end]

    def is_whole(self) -> bool:
        """Whether the bytes arrived as they were sent."""
        sent = self._sums.own if self.record.shared == ABSENT else self._sums.shared
        return sum_of(self.buffer) == sent

    def commit(self) -> None:
        """Its checksum came with it, and stays with it."""
        self._slot.commit(self.record, self._sums)
        self._slot.close()

    def abandon(self) -> None:
        """The sender is gone: the slot stays, and holds nothing."""
        self._slot.close()


def _of_part(record: Record, shared: bool) -> Record:
    return of_shared_part(record) if shared else of_own_part(record)


def _is_one_part(record: Record) -> bool:
    shared = record.own == ABSENT
    return record == _of_part(record, shared) and record.end > HEADER
