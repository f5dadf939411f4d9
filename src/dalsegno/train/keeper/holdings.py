"""What this node holds of a run, as it lies in shared memory. Costs no torch: the agent asks before all else."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.memory.files import SlotName, find_folder, open_own, slots_of
from dalsegno.train.memory.record import ABSENT, HEADER, SnapshotRecord, parse_record, parse_sums


@dataclass(frozen=True)
class StoredSnapshot:
    """A committed snapshot, or a part of one: whose it is, of which step, and which of its two parts are here."""

    name: SlotName
    record: SnapshotRecord
    summed: bool  # its checksums are made

    @property
    def rank(self) -> int:
        return self.name.rank

    @property
    def copy(self) -> bool:
        """Not written by a rank of this node."""
        return self.name.copy

    @property
    def place(self) -> tuple[int, int]:
        return self.record.place

    @property
    def own(self) -> bool:
        return self.record.own != ABSENT

    @property
    def shared(self) -> bool:
        return self.record.shared != ABSENT

    def told(self, sent: bool = False) -> dict[str, object]:
        """As the agent hears of it. `sent`: a buddy has it too."""
        return {
            "rank": self.rank, "step": self.record.step, "generation": self.record.generation,
            "world": self.record.world, "copy": self.copy, "own": self.own, "shared": self.shared,
            "sharded": self.record.sharded, "summed": self.summed, "sent": sent,
        }  # fmt: skip


def holdings(run: str, folder: Path | None = None) -> list[StoredSnapshot]:
    """All that is committed; what is being written, is visibly damaged or another user's, is not there."""
    folder = folder or find_folder()
    if folder is None:
        return []
    found = (_held(name, folder / str(name)) for name in slots_of(run, folder))
    return [held for held in found if held is not None]


def _held(name: SlotName, path: Path) -> StoredSnapshot | None:
    fd = open_own(path)
    if fd is None:
        return None
    try:
        header, size = os.pread(fd, HEADER, 0), os.fstat(fd).st_size
    finally:
        os.close(fd)
    record, sums = parse_record(header), parse_sums(header)
    if record is None or record.end > size:
        return None
    if record.rank != name.rank and record.own != ABSENT:
        return None  # what all ranks have may come from any of them; the rest may not
    return StoredSnapshot(name, record, sums is not None and sums.seq == record.seq)


# ---- The port of a keeper. Whoever starts keepers opens it, and hands it from one to the next.


def listen() -> socket.socket:
    """On all addresses: which one another node knows us by is not ours to know."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", 0), backlog=256)
