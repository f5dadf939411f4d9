"""Two nodes exchange data: on a port that one of them opens, with a secret for this once from the controller."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from dalsegno.health.agent.loads import receive_pattern, send_pattern
from dalsegno.health.result import Remedy, Result, failed, passed
from dalsegno.train.frames import BadFrame, Message, Reader, send
from dalsegno.train.proof import holds, nonce, prove

BYTES = 32 << 20  # each way
TALK_S = 15.0
STRANGER_S = 2.0
PINGS = 20
_ONE = b"!"


def listen(address: str, secret: bytes, listens: Callable[[int], None], least_mbytes_per_s: float = 0.0) -> Result:
    """Wait for the other node; `listens` is told the port. Callers that do not know the secret are hung up on."""
    until = time.monotonic() + TALK_S
    with socket.create_server((address, 0)) as server:
        listens(int(server.getsockname()[1]))
        while (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                sock, _ = server.accept()
            except TimeoutError:
                break
            with sock:
                if _know_each_other(sock, secret, "listener", "dialler"):
                    return _exchange(sock, secret, first=False, least_mbytes_per_s=least_mbytes_per_s)
    return failed("the other node did not come", Remedy.DRAIN, "unreachable")


def dial(address: str, port: int, secret: bytes, least_mbytes_per_s: float = 0.0) -> Result:
    try:
        sock = socket.create_connection((address, port), 5.0)
    except OSError as error:
        return failed(f"{address} cannot be reached: {error.strerror or error}", Remedy.DRAIN, "unreachable")
    with sock:
        if not _know_each_other(sock, secret, "dialler", "listener"):
            return failed(f"{address} does not know the secret of this test", Remedy.DRAIN, "stranger")
        return _exchange(sock, secret, first=True, least_mbytes_per_s=least_mbytes_per_s)


def _know_each_other(sock: socket.socket, secret: bytes, we: str, they: str) -> bool:
    sock.settimeout(STRANGER_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours = nonce()
    try:
        send(sock, {"nonce": ours})
        theirs = _next(sock).get("nonce")
        if not isinstance(theirs, str) or len(theirs) != 32 or not theirs.isalnum() or theirs == ours:
            return False
        send(sock, {"proof": prove(secret, we, theirs, ours)})
        return holds(_next(sock).get("proof"), secret, they, ours, theirs)
    except (OSError, BadFrame):
        return False


def _next(sock: socket.socket) -> Message:
    """The next message; byte by byte at the end, for what follows is no message."""
    reader = Reader(512)
    while data := sock.recv(1):
        for message in reader.feed(data):
            return message
    raise OSError("closed")


def _exchange(sock: socket.socket, secret: bytes, *, first: bool, least_mbytes_per_s: float) -> Result:
    """Pings, then data one way and back; both sides take the times."""
    sock.settimeout(TALK_S)
    try:
        ping_s = _pings(sock, first)
        began = time.monotonic()
        right = _data(sock, secret, first)
        rate = 2 * BYTES / 1e6 / (time.monotonic() - began)
    except OSError as error:
        return failed(f"the exchange broke off: {error}", Remedy.DRAIN, "broken")
    if not right:
        return failed("other bytes came from the other node than it sent", Remedy.REPLACE, "wrong")
    text = f"{BYTES >> 20} MiB each way, {rate:.4g} MB/s, there and back in {1000 * ping_s:.2g} ms"
    return failed(f"too slow: {text}", Remedy.DRAIN, "slow") if rate < least_mbytes_per_s else passed(text)


def _pings(sock: socket.socket, first: bool) -> float:
    times = []
    for _ in range(PINGS):
        began = time.monotonic()
        if first:
            sock.sendall(_ONE)
        if sock.recv(1) != _ONE:
            raise OSError("no answer")
        if not first:
            sock.sendall(_ONE)
        times.append(time.monotonic() - began)
    return sorted(times)[len(times) // 2]


def _data(sock: socket.socket, secret: bytes, first: bool) -> bool:
    """What comes must be what the other side was to send, and the other side must say the same of ours."""
    if first:
        send_pattern(sock, secret + b" out", BYTES)
        right = receive_pattern(sock, secret + b" back", BYTES)
    else:
        right = receive_pattern(sock, secret + b" out", BYTES)
        if not right:
            return False  # the other side hears it: the connection ends
        send_pattern(sock, secret + b" back", BYTES)
    sock.sendall(b"+" if right else b"-")
    return sock.recv(1) == b"+" and right
