"""A keeper's server, for the other keepers of its run."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from dalsegno.train.errors import CheckpointError
from dalsegno.train.keeper.holdings import StoredSnapshot
from dalsegno.train.keeper.plan import COPIES, choose_slot, find_own, find_shared
from dalsegno.train.keeper.state import KeeperState, unlimited
from dalsegno.train.keeper.wire import CALLED, CALLER, IDLE_S, PROOF_S, STALL_S, Channel
from dalsegno.train.memory.free_memory import FreeMemory, check_free_memory, read_free_memory
from dalsegno.train.memory.record import ABSENT, SnapshotRecord, parse_record, parse_sums
from dalsegno.train.memory.slots import capacity_for
from dalsegno.train.memory.snapshot import Incoming, hold_snapshot, pack_part, read_header, read_record
from dalsegno.wire.frames import BadFrame, Message
from dalsegno.wire.handshake import ServerHandshake
from dalsegno.wire.server import BoundedServer, Connection, Proved, SelectorWatcher, ServerLimits


def give(channel: Channel, message: Message, state: KeeperState) -> None:
    """Send a part of a snapshot to the keeper that requested it: its header, then its bytes.

    If this node no longer has the part, say so.
    """
    rank, generation, step, part = message["fetch"]
    shared = part == "shared"
    held = state.held()
    one = find_shared(held, generation, step) if shared else find_own(held, rank, generation, step)
    if one is None or not _give(channel, message, state, one, shared):
        channel.send({"gone": True})


def _give(channel: Channel, message: Message, state: KeeperState, one: StoredSnapshot, shared: bool) -> bool:
    path = state.path_of(one)
    with hold_snapshot(path) as snapshot:
        if snapshot is None or snapshot.record != one.record:
            return False
        sums = parse_sums(read_header(path)) if one.summed else None
        with channel.at_work():
            header, part = pack_part(snapshot, sums, shared)
        same = message.get("header") == header.hex()
        start = min(max(0, int(message.get("at", 0))), len(part)) if same else 0
        channel.send({"header": header.hex(), "at": start})
        channel.answer()
        channel.send_part(path, one.record.shared if shared else one.record.own, start, unlimited())
        return True


# Copies from other nodes. An incoming copy never overwrites the newest complete one, and is used only once complete

MAX_RANKS = 1 << 20


class SnapshotReceiver:
    """Receives copies, one per rank at a time.

    A sender that reconnects must wait until its old connection has ended.
    """

    def __init__(self, state: KeeperState, read_free_memory: Callable[[Path], FreeMemory] = read_free_memory) -> None:
        self._state, self._read_free_memory = state, read_free_memory
        self._busy: set[int] = set()
        self._lock = threading.Lock()

    def take(self, channel: Channel, message: Message) -> None:
        """Answer the offer of a copy, and receive the copy unless it is refused."""
        header = bytes.fromhex(message["header"])
        record = parse_record(header)
        if record is None or record.shared != ABSENT or not record.rank < record.world <= MAX_RANKS:
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
        keep = self._state.keep
        if keep is None or generation < keep.generation:
            return {"refused": "the run has replaced this generation"}
        paths = [self._state.path(record.rank, slot) for slot in range(COPIES)]
        copies = [read_record(path) for path in paths]
        if record in copies:
            return {"have": True}
        slot = choose_slot(copies, [path.exists() for path in paths], keep, self._state.safe())
        if slot is None:
            return {"later": True}
        return self._receive(channel, paths[slot], header, record)

    def _receive(self, channel: Channel, path: Path, header: bytes, record: SnapshotRecord) -> Message:
        check_copy_fits(path, record, self._read_free_memory)
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
            return {"refused": "the copy is no longer wanted"}  # the copy was dropped while it was received
        self._state.refresh()
        return {"kept": True}


def check_copy_fits(
    path: Path, record: SnapshotRecord, read_free_memory: Callable[[Path], FreeMemory] = read_free_memory
) -> None:
    """Raise NotEnoughMemory if the copy does not fit, before any memory is allocated."""
    there = path.stat().st_size if path.exists() else 0
    check_free_memory(max(0, capacity_for(record.end) - there), read_free_memory(path.parent), 1)


# Connections from other keepers


_MAX_CALLS = 256
LIMITS = ServerLimits(unauthenticated=32, unauthenticated_s=PROOF_S, unauthenticated_bytes=1 << 10)


class KeeperServer:
    """Accepts connections from the other keepers of the run.

    One thread authenticates all callers. Each authenticated keeper then gets its own thread.
    """

    def __init__(self, state: KeeperState, listener: socket.socket) -> None:
        self._state, self._listener = state, listener
        self._receiving = SnapshotReceiver(state)
        self._calls = threading.BoundedSemaphore(_MAX_CALLS)
        self._selector = selectors.DefaultSelector()
        self._server: BoundedServer[str] = BoundedServer(SelectorWatcher(self._selector), self, CALLER, CALLED, LIMITS)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def accept_loop(self) -> None:
        """Accept connections once the agent has sent the secret. Until then callers wait in the kernel's queue."""
        while self._state.wait_for_orders(PROOF_S) is None:
            pass
        self._server.listen_on(self._listener)
        while True:
            due = self._server.wake(time.monotonic())
            timeout_s = None if due is None else max(0.0, due - time.monotonic())
            for key, events in self._selector.select(timeout_s):
                key.data(events)

    # Methods that the bounded server calls

    def greeting(self) -> Message:
        return {}

    def identify(self, hello: Message, handshake: ServerHandshake) -> Proved[str]:
        keep = self._state.keep
        if keep is None:
            raise BadFrame("this keeper has no orders")
        return Proved("keeper", handshake.check(hello, keep.secret, keep.run, keep.node))

    def admit(self, peer: Connection[str], who: str) -> str:
        return ""

    def on_connect(self, peer: Connection[str]) -> None:
        """Pass the connection to its own thread, because bulk data is read and written with blocking calls."""
        if not self._calls.acquire(blocking=False):
            raise OSError("too many calls")
        try:
            sock = self._server.detach(peer)
            assert peer.session is not None
            threading.Thread(target=self._call, args=(Channel(sock, peer.session),), daemon=True, name="call").start()
        except RuntimeError as error:  # no thread could be started
            self._calls.release()
            peer.sock.close()
            raise OSError(str(error)) from error
        except BaseException:
            self._calls.release()
            raise

    def on_message(self, peer: Connection[str], message: Message) -> None:
        """Do nothing: connections are detached as soon as they are authenticated."""

    def on_disconnect(self, peer: Connection[str]) -> None:
        """Do nothing for a peer that could not be detached."""

    def on_refused(self, cause: str, detail: str) -> None:
        """Do nothing, so that refused peers do not fill the log."""

    def _call(self, channel: Channel) -> None:
        try:
            with channel:
                self._serve(channel)
        finally:
            self._calls.release()

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
                    give(channel, message, self._state)
