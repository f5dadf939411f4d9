"""A rank's own part, as it goes to another node and is kept there.

What is sent is what the copy's file will hold: its header, then the part.
"""

from __future__ import annotations

from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.checksum import sums_of
from dalsegno.train.memory.record import HEADER, Sums, of_own_part, parse_record, parse_sums
from dalsegno.train.memory.slot import Slot
from dalsegno.train.memory.snapshot import Snapshot


def outgoing(snapshot: Snapshot, sums: Sums | None = None) -> tuple[bytes, memoryview]:
    """Header and bytes to send; the part's checksum goes with them."""
    record = of_own_part(snapshot.record)
    own = (sums or sums_of(snapshot)).own
    return record.pack() + Sums(record.seq, 0, own).pack(), snapshot.part(snapshot.record.own)


class Incoming:
    """A copy on its way in: fill `buffer`, then commit. Until then the slot holds nothing."""

    def __init__(self, path: Path, header: bytes) -> None:
        record, sums = parse_record(header), parse_sums(header)
        if record is None or sums is None or record != of_own_part(record):
            raise CheckpointError(f"what was sent for {path.name} is no copy of a snapshot")
        self.record, self._sums, self._slot = record, sums, Slot(path)
        self._slot.make_fit(record.end)
        if not self._slot.begin():
            self._slot.close()
            raise CheckpointError(f"{path.name} is being read", "send it again later")

    @property
    def buffer(self) -> memoryview:
        return self._slot.buffer[HEADER : self.record.end]

    def commit(self) -> None:
        """Its checksum came with it: `verify` tells whether the bytes arrived as they were sent."""
        self._slot.commit(self.record, self._sums)
        self._slot.close()

    def abandon(self) -> None:
        """The sender is gone: the slot stays, and holds nothing."""
        self._slot.close()
