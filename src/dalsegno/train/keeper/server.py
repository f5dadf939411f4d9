"""The server of a keeper for the other keepers of its run."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.keeper.books import Books, unlimited
from dalsegno.train.keeper.holdings import StoredSnapshot
from dalsegno.train.keeper.plan import COPIES, find_own, find_shared, slot_for
from dalsegno.train.keeper.wire import IDLE_S, PROOF_S, STALL_S, Channel, Stranger, prove_as_called
from dalsegno.train.memory.record import ABSENT, SnapshotRecord, parse_record, parse_sums
from dalsegno.train.memory.room import FreeMemory, check_room, read_room
from dalsegno.train.memory.slots import capacity_for
from dalsegno.train.memory.snapshot import Incoming, held_snapshot, outgoing, read_header, read_record
from dalsegno.wire.bounds import WaitingConnections
from dalsegno.wire.frames import BadFrame, Message


def give(channel: Channel, message: Message, books: Books) -> None:
    """Send a part of a snapshot to a keeper that requests it: its header, then its bytes."""
    rank, generation, step, part = message["fetch"]
    shared = part == "shared"
    held = books.held()
    one = find_shared(held, generation, step) if shared else find_own(held, rank, generation, step)
    if one is None or not _give(channel, message, books, one, shared):
        channel.send({"gone": True})


def _give(channel: Channel, message: Message, books: Books, one: StoredSnapshot, shared: bool) -> bool:
    path = books.path_of(one)
    with held_snapshot(path) as snapshot:
        if snapshot is None or snapshot.record != one.record:
            return False
        sums = parse_sums(read_header(path)) if one.summed else None
        with channel.at_work():
            header, part = outgoing(snapshot, sums, shared)
        same = message.get("header") == header.hex()
        start = min(max(0, int(message.get("at", 0))), len(part)) if same else 0
        channel.send({"header": header.hex(), "at": start})
        channel.answer()
        channel.send_part(path, one.record.shared if shared else one.record.own, start, unlimited())
        return True


# Copies from other nodes: each is written beside the newest complete one, and counts when it is complete

MOST_RANKS = 1 << 20


class Receiving:
    """Receives copies, one per rank at a time: if its sender reconnects, the old connection ends first."""

    def __init__(self, books: Books, read_room: Callable[[Path], FreeMemory] = read_room) -> None:
        self._books, self._read_room = books, read_room
        self._busy: set[int] = set()
        self._lock = threading.Lock()

    def take(self, channel: Channel, message: Message) -> None:
        """Answer an offer and receive the copy."""
        header = bytes.fromhex(message["header"])
        record = parse_record(header)
        if record is None or record.shared != ABSENT or not record.rank < record.world <= MOST_RANKS:
            raise CheckpointError("the offer is not a copy of a snapshot")
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

    def _answer(self, channel: Channel, record: SnapshotRecord, header: bytes, generation: int) -> Message:
        keep = self._books.keep
        if keep is None or generation < keep.generation:
            return {"refused": "the run has replaced this generation"}
        paths = [self._books.path(record.rank, slot) for slot in range(COPIES)]
        copies = [read_record(path) for path in paths]
        if record in copies:
            return {"have": True}
        slot = slot_for(copies, [path.exists() for path in paths], keep, self._books.safe())
        if slot is None:
            return {"later": True}
        return self._receive(channel, paths[slot], header, record)

    def _receive(self, channel: Channel, path: Path, header: bytes, record: SnapshotRecord) -> Message:
        make_room(path, record, self._read_room)
        with channel.at_work():
            coming = Incoming(path, header)
        channel.send({"go": True})
        if channel.fill(coming.buffer, 0) < len(coming.buffer):
            coming.abandon()
            raise ConnectionError("the sender disconnected")
        with channel.at_work():
            whole = coming.is_whole()
        if not whole:
            coming.abandon()
            return {"damaged": True}
        coming.commit()
        if read_record(path) != record:
            return {"refused": "the copy is no longer wanted"}  # dropped while it was received
        self._books.refresh()
        return {"kept": True}


def make_room(path: Path, record: SnapshotRecord, read_room: Callable[[Path], FreeMemory] = read_room) -> None:
    """Raise NoRoom if the copy does not fit, before any memory is allocated."""
    there = path.stat().st_size if path.exists() else 0
    check_room(max(0, capacity_for(record.end) - there), read_room(path.parent), 1)


# Connections

_MOST_CALLS = 256
_MOST_UNPROVEN = 32
_MOST_HEARD = 2 * _MOST_UNPROVEN  # with rejected callers whose threads have not ended yet
_FULL_PAUSE_S = 0.1  # when no file descriptor or thread is left


@dataclass(frozen=True, eq=False)
class _Stranger:
    """A caller that has not authenticated yet."""

    sock: socket.socket
    owner: str  # its address
    until: float


class KeeperServer:
    """A server with one thread per connection.

    Few unauthenticated callers may wait at a time: the address with the most of them loses its oldest.
    """

    def __init__(self, books: Books, listener: socket.socket) -> None:
        self._books, self._listener = books, listener
        self._receiving = Receiving(books)
        self._lock = threading.Lock()
        self._unproven: WaitingConnections[_Stranger] = WaitingConnections(_MOST_UNPROVEN)
        self._calls = threading.BoundedSemaphore(_MOST_CALLS)
        self._heard = threading.BoundedSemaphore(_MOST_HEARD)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def accept_for_ever(self) -> None:
        """Accept connections once the agent has sent the secret. Until then callers wait in the kernel's queue."""
        while self._books.wait_for_orders(PROOF_S) is None:
            pass
        while True:
            self._heard.acquire()
            try:
                self._accept()
            except (OSError, RuntimeError):  # the caller is gone, or there is no descriptor or thread left
                self._heard.release()
                time.sleep(_FULL_PAUSE_S)

    def _accept(self) -> None:
        sock, address = self._listener.accept()
        stranger = _Stranger(sock, str(address[0]), time.monotonic() + PROOF_S)
        self._admit(stranger)
        try:
            threading.Thread(target=self._handle, args=(stranger,), daemon=True, name="call").start()
        except RuntimeError:
            self._forget(stranger)
            sock.close()
            raise

    def _admit(self, stranger: _Stranger) -> None:
        with self._lock:
            excess = self._unproven.add(stranger)
            if excess is not None:
                self._unproven.remove(excess)
                with contextlib.suppress(OSError):
                    excess.sock.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _forget(self, stranger: _Stranger) -> None:
        with self._lock:
            self._unproven.remove(stranger)

    def _handle(self, stranger: _Stranger) -> None:
        with stranger.sock as sock:
            try:
                channel = self._authenticate(sock)
            finally:
                self._forget(stranger)
                self._heard.release()
            if channel is not None and self._calls.acquire(blocking=False):
                try:
                    self._serve(channel)
                finally:
                    self._calls.release()

    def _authenticate(self, sock: socket.socket) -> Channel | None:
        keep = self._books.keep
        try:
            if keep is not None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return prove_as_called(sock, keep.run, keep.secret, keep.node)
        except (OSError, BadFrame, Stranger, ValueError):
            pass
        return None

    def _serve(self, channel: Channel) -> None:
        """Answer requests until the caller disconnects or sends an invalid one."""
        with contextlib.suppress(OSError, BadFrame, CheckpointError, KeyError, TypeError, ValueError):
            while True:
                channel.sock.settimeout(IDLE_S)
                message = channel.receive()
                channel.sock.settimeout(STALL_S)
                if "offer" in message:
                    self._receiving.take(channel, message)
                else:
                    give(channel, message, self._books)
