"""Two keepers on one connection: both prove that they know the run's secret, then frames and bare bytes take turns."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dalsegno.train.frames import BadFrame, Message, Reader, send
from dalsegno.train.keeper.orders import Address
from dalsegno.train.keeper.pace import Pace
from dalsegno.train.memory.owned import open_own
from dalsegno.train.memory.record import Extent
from dalsegno.train.proof import holds, nonce, prove

CONNECT_S = 2.0
PROOF_S = 5.0
STALL_S = 5.0  # a connection on which nothing moves for so long is as good as broken
BEAT_S = 1.0
IDLE_S = 60.0
_PROOF_BYTES = 1 << 10  # all that a stranger can make us hold
_FRAME_BYTES = 16 << 10
_LENGTH_BYTES = 4
_AT_ONCE = 4 << 20


class Stranger(Exception):
    """Whoever is there does not know the run's secret."""


def dial(address: Address, run: str, secret: bytes) -> socket.socket:
    """A connection to another keeper of this run."""
    sock = socket.create_connection(address, CONNECT_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _prove_as_caller(sock, run, secret)
        sock.settimeout(STALL_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _prove_as_caller(sock: socket.socket, run: str, secret: bytes) -> None:
    until = time.monotonic() + PROOF_S
    theirs, ours = str(receive(sock, until, _PROOF_BYTES).get("nonce")), nonce()
    send(sock, {"run": run, "nonce": ours, "proof": prove(secret, "keeper that calls", theirs, ours, run)})
    answer = receive(sock, until, _PROOF_BYTES).get("proof")
    if not holds(answer, secret, "keeper that is called", ours, theirs, run):
        raise Stranger("the keeper that answered does not know the run's secret")


def prove_as_called(sock: socket.socket, run: str, secret: bytes) -> None:
    """The other side has to prove itself first: a stranger learns nothing."""
    until, ours = time.monotonic() + PROOF_S, nonce()
    sock.settimeout(PROOF_S)
    send(sock, {"nonce": ours})
    hello = receive(sock, until, _PROOF_BYTES)
    theirs = str(hello.get("nonce"))
    if not holds(hello.get("proof"), secret, "keeper that calls", ours, theirs, run):
        raise Stranger("a caller does not know the run's secret")
    send(sock, {"proof": prove(secret, "keeper that is called", theirs, ours, run)})


def receive(sock: socket.socket, until: float | None = None, limit: int = _FRAME_BYTES) -> Message:
    """The next frame, and not a byte beyond it. No more than `limit` bytes are ever held."""
    length = _exactly(sock, _LENGTH_BYTES, until)
    if int.from_bytes(length, "big") > limit:
        raise BadFrame(f"a message of {int.from_bytes(length, 'big')} bytes is longer than {limit}")
    body = _exactly(sock, int.from_bytes(length, "big"), until)
    return next(iter(Reader().feed(length + body)))


def answer(sock: socket.socket) -> Message:
    """The next frame of someone who may have long work to do before, and says so."""
    while True:
        message = receive(sock)
        if "wait" not in message:
            return message


@contextlib.contextmanager
def at_work(sock: socket.socket) -> Iterator[None]:
    """Whoever waits for our answer hears meanwhile that we live: memory and checksums of a large part take seconds."""
    done = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):
            while not done.wait(BEAT_S):
                send(sock, {"wait": True})

    beating = threading.Thread(target=beat, daemon=True)
    beating.start()
    try:
        yield
    finally:
        done.set()
        beating.join()


def _exactly(sock: socket.socket, count: int, until: float | None) -> bytes:
    data = b""
    while len(data) < count:
        if until is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the other side has hung up")
        data += more
    return data


def send_part(sock: socket.socket, path: Path, part: Extent, start: int, pace: Pace) -> None:
    """The part's bytes from `start` on, straight from the file."""
    fd = open_own(path)
    if fd is None:
        raise ConnectionError(f"{path.name} is gone")
    with open(fd, "rb", buffering=0) as file:
        for at in range(part.at + start, part.end, pace.chunk):
            count = min(pace.chunk, part.end - at)
            pace.take(count)
            if sock.sendfile(file, at, count) != count:
                raise ConnectionError(f"{path.name} became shorter")


def fill(sock: socket.socket, buffer: memoryview, start: int) -> int:
    """Bytes from the connection into the buffer, up to its end; how far it came before the connection broke."""
    at = start
    with contextlib.suppress(OSError):
        while at < len(buffer):
            count = sock.recv_into(buffer[at : at + _AT_ONCE])
            if not count:
                break
            at += count
    return at
