"""From a rank of another node: its part is written beside the newest one that is whole, and counts when it is whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.frames import Message
from dalsegno.train.keeper.books import Books
from dalsegno.train.keeper.plan import COPIES, slot_for
from dalsegno.train.keeper.wire import Channel
from dalsegno.train.memory.record import ABSENT, Record, parse_record
from dalsegno.train.memory.room import Room, check_room, read_room
from dalsegno.train.memory.slots import capacity_for
from dalsegno.train.memory.snapshot import Incoming, read_record

MOST_RANKS = 1 << 20


class Receiving:
    """One copy of a rank at a time: should its sender have called anew, the old call ends first."""

    def __init__(self, books: Books, read_room: Callable[[Path], Room] = read_room) -> None:
        self._books, self._read_room = books, read_room
        self._busy: set[int] = set()
        self._lock = threading.Lock()

    def take(self, channel: Channel, message: Message) -> None:
        """Answer an offer, and receive what was offered."""
        header = bytes.fromhex(message["header"])
        record = parse_record(header)
        if record is None or record.shared != ABSENT or not record.rank < record.world <= MOST_RANKS:
            raise CheckpointError("what was offered is no copy of a snapshot")
        if not self._begin(record.rank):
            channel.send({"later": True})
            return
        try:
            channel.send(self._answer(channel, record, header, int(message["offer"])))
        except CheckpointError as error:
            channel.send({"refused": str(error)})
        finally:
            with self._lock:
                self._busy.discard(record.rank)

    def _begin(self, rank: int) -> bool:
        with self._lock:
            free = rank not in self._busy
            self._busy.add(rank)
            return free

    def _answer(self, channel: Channel, record: Record, header: bytes, generation: int) -> Message:
        keep = self._books.keep
        if keep is None or generation < keep.generation:
            return {"refused": "the run has gone on without this generation"}
        paths = [self._books.path(record.rank, slot) for slot in range(COPIES)]
        copies = [read_record(path) for path in paths]
        if record in copies:
            return {"have": True}
        slot = slot_for(copies, [path.exists() for path in paths], keep, self._books.safe())
        if slot is None:
            return {"later": True}
        return self._receive(channel, paths[slot], header, record)

    def _receive(self, channel: Channel, path: Path, header: bytes, record: Record) -> Message:
        make_room(path, record, self._read_room)
        with channel.at_work():
            coming = Incoming(path, header)
        channel.send({"go": True})
        if channel.fill(coming.buffer, 0) < len(coming.buffer):
            coming.abandon()
            raise ConnectionError("the sender is gone")
        with channel.at_work():
            whole = coming.is_whole()
        if not whole:
            coming.abandon()
            return {"damaged": True}
        coming.commit()
        if read_record(path) != record:
            return {"refused": "it is not wanted any more"}  # dropped while it came
        self._books.look()
        return {"kept": True}


def make_room(path: Path, record: Record, read_room: Callable[[Path], Room] = read_room) -> None:
    """Refuse what would not fit, before a byte of it is allocated."""
    there = path.stat().st_size if path.exists() else 0
    check_room(max(0, capacity_for(record.end) - there), read_room(path.parent), 1)
