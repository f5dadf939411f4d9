"""The protocol between two keepers: both prove that they know the run's secret, then send messages and bulk data.

The proofs cover the name of the node that the caller wants to reach. All keepers of a run share its secret. Without the
name, an attacker who redirects packets could connect a node to itself, and the node would store its own copies.

Messages are sealed: encrypted and authenticated (`wire/handshake.py`). Bulk data (the bytes of a snapshot) is not
encrypted, because it may be many gigabytes and the standard library has no fast cipher. It is authenticated: each piece
has a tag made with the connection's key, and pieces with a wrong tag are discarded. An attacker on the network can read
a snapshot but not change it.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from dalsegno.train.keeper.plan import KeeperAddress
from dalsegno.train.keeper.state import ByteRate
from dalsegno.train.memory.files import open_own
from dalsegno.train.memory.record import Extent
from dalsegno.wire.client import prove_as_client, read_exactly, read_frame
from dalsegno.wire.frames import Message
from dalsegno.wire.handshake import TAG_BYTES, ClientHandshake, Session, Tags

CONNECT_S = 2.0
PROOF_S = 5.0
STALL_S = 5.0  # a connection that transfers nothing for this long counts as broken
BEAT_S = 1.0
IDLE_S = 60.0
CALLER, CALLED = "keeper that calls/3", "keeper that is called/3"
_FRAME_BYTES = 16 << 10
PIECE = 1 << 20  # number of bytes covered by one tag
_AHEAD = 4  # number of pieces whose tags are computed in parallel, on both ends
_THREADS = 2


class Channel:
    """An authenticated connection between two keepers."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock, self.forged = sock, False
        self._closer, self._opener = session.closer, session.opener
        self._outgoing, self._incoming = Tags(session, session.own_side), Tags(session, session.peer_side)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def hang_up(self) -> None:
        """Shut the connection down from another thread, so that a thread that is blocked on it returns."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def send(self, message: Message) -> None:
        self.sock.sendall(self._closer.close(message))

    def receive(self) -> Message:
        """Return the next message without reading beyond it."""
        return self._opener.open(read_frame(self.sock, _FRAME_BYTES + TAG_BYTES))

    def answer(self) -> Message:
        """Return the peer's answer. Skip the `wait` messages that the peer may send while it works."""
        while True:
            message = self.receive()
            if "wait" not in message:
                return message

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Send `wait` messages while the block runs, because allocating and checksumming a large part takes seconds."""
        done = threading.Event()

        def beat() -> None:
            with contextlib.suppress(OSError):
                while not done.wait(BEAT_S):
                    self.send({"wait": True})

        beating = threading.Thread(target=beat, daemon=True)
        beating.start()
        try:
            yield
        finally:
            done.set()
            beating.join()

    def send_part(self, path: Path, part: Extent, start: int, pace: ByteRate) -> None:
        """Send the part's bytes, beginning at `start`, directly from the file, with a tag after each piece."""
        fd = open_own(path)
        if fd is None:
            raise ConnectionError(f"{path.name} is gone")
        with open(fd, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < part.end:
                raise ConnectionError(f"{path.name} became shorter")
            mapped = mmap.mmap(file.fileno(), part.end, access=mmap.ACCESS_READ)
            with mapped, memoryview(mapped) as view, ThreadPoolExecutor(_THREADS) as pool:
                waiting: deque[tuple[int, int, Future[bytes]]] = deque()
                for at in range(part.at + start, part.end, PIECE):
                    end = min(at + PIECE, part.end)
                    waiting.append((at, end, pool.submit(_tag, self._outgoing.next(), view, at, end)))
                    if len(waiting) >= _AHEAD:
                        self._send_piece(file, *waiting.popleft(), pace)
                for piece in waiting:
                    self._send_piece(file, *piece, pace)

    def _send_piece(self, file: BinaryIO, at: int, end: int, tag: Future[bytes], pace: ByteRate) -> None:
        for begin in range(at, end, pace.chunk):
            count = min(pace.chunk, end - begin)
            pace.take(count)
            if self.sock.sendfile(file, begin, count) != count:
                raise ConnectionError("the snapshot became shorter")
        self.sock.sendall(tag.result())

    def fill(self, buffer: memoryview, start: int) -> int:
        """Fill the buffer from the offset `start`, and return the offset up to which its bytes arrived with valid tags.

        If that is less than the full length, the connection is unusable. `forged` is then set if a tag did not match.
        """
        good = start
        with ThreadPoolExecutor(_THREADS) as pool:
            waiting: deque[tuple[int, Future[bool]]] = deque()
            with contextlib.suppress(OSError):
                for at in range(start, len(buffer), PIECE):
                    piece = buffer[at : at + PIECE]
                    tag = self._receive_piece(piece)
                    waiting.append((at + len(piece), pool.submit(_is_genuine, self._incoming.next(), piece, tag)))
                    if len(waiting) >= _AHEAD and not waiting[0][1].result():
                        break
            for end, genuine in waiting:
                if not genuine.result():
                    self.forged = True
                    break
                good = end
        return good

    def _receive_piece(self, piece: memoryview) -> bytes:
        at = 0
        while at < len(piece):
            count = self.sock.recv_into(piece[at:])
            if not count:
                raise ConnectionError("the peer disconnected")
            at += count
        return read_exactly(self.sock, TAG_BYTES)


def _tag(tag: Callable[[memoryview], bytes], view: memoryview, at: int, end: int) -> bytes:
    with view[at:end] as piece:
        return tag(piece)


def _is_genuine(tag: Callable[[memoryview], bytes], piece: memoryview, sent: bytes) -> bool:
    return hmac.compare_digest(tag(piece), sent)


def dial(address: KeeperAddress, run: str, secret: bytes) -> Channel:
    """Connect to the keeper of the node that the address names. A keeper of any other node refuses."""
    sock = socket.create_connection((address.host, address.port), CONNECT_S)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake, until = ClientHandshake(CALLER, CALLED), time.monotonic() + PROOF_S
        session = prove_as_client(sock, handshake, secret, run, address.node, fields={"run": run}, until=until)
        sock.settimeout(STALL_S)
    except BaseException:
        sock.close()
        raise
    return Channel(sock, session)
