"""The snapshots of a run in this node's shared memory.

This module does not import torch, because the agent uses it at its start.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.memory.files import SlotName, find_folder, list_slots, open_own
from dalsegno.train.memory.record import ABSENT, HEADER, SnapshotRecord, parse_record, parse_sums


@dataclass(frozen=True)
class StoredSnapshot:
    """A committed snapshot, or a part of one: its rank, its step, and which of its two parts are here."""

    name: SlotName
    record: SnapshotRecord
    summed: bool  # whether the snapshot has checksums

    @property
    def rank(self) -> int:
        return self.name.rank

    @property
    def copy(self) -> bool:
        """Return whether this is a copy that came from another node."""
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

    def to_message(self, sent: bool = False) -> dict[str, object]:
        """Return the message for the agent. `sent` says whether the buddy has a copy."""
        return {
            "rank": self.rank, "step": self.record.step, "generation": self.record.generation,
            "world": self.record.world, "copy": self.copy, "own": self.own, "shared": self.shared,
            "sharded": self.record.sharded, "summed": self.summed, "sent": sent,
        }  # fmt: skip


def holdings(run: str, folder: Path | None = None) -> list[StoredSnapshot]:
    """Return all committed snapshots of the run, except those that are visibly damaged or belong to other users."""
    folder = folder or find_folder()
    if folder is None:
        return []
    found = (_held(name, folder / str(name)) for name in list_slots(run, folder))
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
        return None  # a file named after this rank may hold another rank's shared part, but not its own part
    return StoredSnapshot(name, record, sums is not None and sums.seq == record.seq)


def listen() -> socket.socket:
    """Open the port of a keeper, on all addresses. The agent passes the socket from one keeper to the next."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", 0), backlog=256)
