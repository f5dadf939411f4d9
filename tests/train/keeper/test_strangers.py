"""A caller without the run's secret gets nothing and cannot make a keeper do anything."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.keeper.state import unlimited
from dalsegno.train.keeper.wire import CALLED, CALLER, PIECE, Channel, dial
from dalsegno.train.memory.record import HEADER, Extent, SnapshotRecord, SnapshotSums, record_of_own_part
from dalsegno.wire.client import read_frame
from dalsegno.wire.frames import Message, parse, send
from dalsegno.wire.handshake import BadProof, Session, nonce, prove
from tests.train.keeper.conftest import NewNode
from tests.train.keeper.nodes import RUN, SECRET, Node
from tests.train.keeper.relay import flip_at
from tests.train.keeper.test_copies import pair
from tests.train.memory.states import filled

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part


def test_keeper_with_another_secret_can_neither_send_nor_fetch(node: NewNode) -> None:
    one, other = pair(node)
    one.commit(filled(1))
    one.until(one.sent)
    stranger = node("stranger")
    stranger.keep(other.address, secret="00" * 32)
    stranger.commit(filled(2, rank=1, world=2))
    stranger.until(lambda: [kept for kept in stranger.kept if kept["summed"]])
    answer = stranger.fetch(0, 1, own=[other.address], shared=[one.address])
    assert not answer["ok"]
    assert stranger.sent() == [] and [copy.rank for copy in other.copies()] == [0]


def exchange(node: Node, data: bytes) -> bytes:
    """Send data as an unauthenticated caller, and return everything that the keeper answers."""
    with node.call() as sock:
        sock.sendall(data)
        with contextlib.suppress(OSError):  # the keeper has already disconnected
            sock.shutdown(socket.SHUT_WR)
        received = b""
        while True:
            try:
                more = sock.recv(4096)
            except ConnectionResetError:
                return received
            if not more:
                return received
            received += more


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 1 << 31), struct.pack("!I", 2) + b"[]"]
)
def test_stranger_receives_only_a_nonce(node: NewNode, sent: bytes) -> None:
    one = node("one")
    one.keep()
    one.commit(filled(1))
    one.until(lambda: one.kept)
    assert len(exchange(one, sent)) < 100
    assert one.fetch(0, 1)["ok"]


def test_no_caller_is_served_before_the_agent_sends_the_secret(node: NewNode) -> None:
    """A caller that connects early has to wait."""
    one = node("one")
    with one.call() as early:
        early.settimeout(0.2)
        with pytest.raises(TimeoutError):
            early.recv(4096)
        one.keep()
        early.settimeout(60)
        assert b"nonce" in early.recv(4096)


def test_idle_strangers_do_not_block_others(node: NewNode) -> None:
    one, other = node("one"), node("other")
    other.keep()
    other.ready()
    waiting = [other.call() for _ in range(80)]
    one.keep(other.address)
    one.commit(filled(1))
    one.until(one.sent)
    for sock in waiting:
        sock.close()


def test_called_keeper_must_prove_itself() -> None:
    """A stranger on the buddy's address receives no state."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: prove_as_called_with(listener, b"another"))
        thread.start()
        with pytest.raises((BadProof, ConnectionError)):
            dial(KeeperAddress(*listener.getsockname(), "other"), RUN, bytes.fromhex(SECRET))
        thread.join()


def prove_as_called_with(listener: socket.socket, secret: bytes) -> None:
    sock, _ = listener.accept()
    with sock:
        send(sock, {"nonce": nonce()})
        theirs = parse(read_frame(sock, 1 << 10))["nonce"]
        send(sock, {"proof": prove(secret, CALLED, theirs, "", RUN, "other")})


def drip(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the receiver has disconnected
        for number in range(len(data)):
            sock.sendall(data[number : number + 1])
            time.sleep(0.02)


def test_slow_sender_is_disconnected() -> None:
    """The deadline covers the whole proof, not each byte."""
    one, other = socket.socketpair()
    with one, other:
        drips = threading.Thread(target=drip, args=(other, struct.pack("!I", 100) + bytes(100)))
        drips.start()
        with pytest.raises(TimeoutError):
            read_frame(one, 100, time.monotonic() + 0.2)
        one.close()
        drips.join()


def offered(length: int, rank: int = 0, world: int = 1) -> Message:
    own = Extent(HEADER, length, 2, 0)
    record = record_of_own_part(SnapshotRecord(1, 1, 1, rank, world, own, own))
    return {"offer": 1, "header": (record.pack() + SnapshotSums(1, 0, 0).pack()).hex()}


def test_too_large_copy_is_refused_before_allocation(node: NewNode) -> None:
    one = node("one")
    one.keep()
    one.ready()
    with dial(one.address, RUN, bytes.fromhex(SECRET)) as channel:
        channel.send(offered(1 << 50))
        assert "more" in channel.receive()["refused"]
    assert os.listdir(one.folder) == []


@pytest.mark.parametrize(
    "message",
    [{}, {"offer": 1, "header": "00"}, {"offer": 1, "header": 5}, {"offer": "x"}, {"fetch": ["../../etc", 1, 1, "own"]},
     {"fetch": 1}, offered(100, rank=5)],
)  # fmt: skip
def test_invalid_message_ends_only_its_connection(node: NewNode, message: Message) -> None:
    one = node("one")
    one.keep()
    one.commit(filled(1))
    one.ready()
    with dial(one.address, RUN, bytes.fromhex(SECRET)) as channel:
        channel.send(message)
        with pytest.raises(ConnectionError):
            while not channel.receive().get("gone"):
                pass
            raise ConnectionError("that is an answer too")
    assert one.fetch(0, 1)["ok"]


def test_busy_peer_sends_wait_messages() -> None:
    one, other = channels()
    with one, other:
        with other.at_work():
            assert one.receive() == {"wait": True}
        other.send({"go": True})
        assert one.answer() == {"go": True}


def channels() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    for sock in (one, other):
        sock.settimeout(60)
    caller, called = Session(b"s", CALLER, CALLED, (RUN,)), Session(b"s", CALLED, CALLER, (RUN,))
    return Channel(one, caller), Channel(other, called)


def part_of(path: Path, data: bytes) -> Extent:
    path.write_bytes(bytes(64) + data)
    path.chmod(0o600)
    return Extent(64, len(data), 0, 0)


@pytest.mark.parametrize("length", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 17])
@pytest.mark.parametrize("start", [0, 1, PIECE])
def test_bulk_data_arrives_unchanged_from_any_offset(tmp_path: Path, length: int, start: int) -> None:
    data, (one, other) = os.urandom(length), channels()
    start = min(start, length)
    part, buffer = part_of(tmp_path / "part", data), bytearray(data[:start] + bytes(length - start))
    with one, other:
        thread = threading.Thread(target=one.send_part, args=(tmp_path / "part", part, start, unlimited()))
        thread.start()
        assert other.fill(memoryview(buffer), start) == length and buffer == data and not other.forged
        thread.join()
        one.send({"and": "messages go on"})
        assert other.receive() == {"and": "messages go on"}


@pytest.mark.parametrize("at", [0, PIECE - 1, PIECE, 2 * PIECE + 40, 3 * PIECE + 70])
def test_changed_bulk_data_is_discarded(tmp_path: Path, at: int) -> None:
    """This covers changes of bytes and of tags. Pieces before the change count."""
    data = os.urandom(3 * PIECE)
    part, buffer = part_of(tmp_path / "part", data), bytearray(3 * PIECE)
    (one, between), (behind, other) = channels(), channels()

    def spoil() -> None:
        before = 0
        with contextlib.suppress(OSError):
            while more := between.sock.recv(65536):
                behind.sock.sendall(flip_at(at)(before, more))
                before += len(more)

    threads = [
        threading.Thread(target=spoil),
        threading.Thread(target=swallow(one.send_part), args=(tmp_path / "part", part, 0, unlimited())),
    ]
    with one, between, behind, other:
        for thread in threads:
            thread.start()
        came = other.fill(memoryview(buffer), 0)
        assert other.forged and came == min(at // (PIECE + 32), 3) * PIECE and buffer[:came] == data[:came]
        for channel in (one, between, behind, other):
            channel.hang_up()
        for thread in threads:
            thread.join()


def swallow(work: Callable[..., None]) -> Callable[..., None]:
    def run(*args: object) -> None:
        with contextlib.suppress(OSError):
            work(*args)

    return run
