"""What two nodes that have met try together: bytes there and back, and an all-reduce. Both are told what came of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from dalsegno.health.agent.collective import LOAD_S, Collective
from dalsegno.health.agent.loads import receive_pattern, send_pattern
from dalsegno.health.checks.late import blame
from dalsegno.health.result import Remedy, Result, Verdict, failed, passed, unknown
from dalsegno.health.validation_times import ANSWER_S
from dalsegno.train.frames import BadFrame, Message, Reader, send

BYTES = 32 << 20  # each way
TALK_S = 20.0
PINGS = 20
_ONE = b"!"


def try_together(sock: socket.socket, secret: bytes, rank: int, collective: Collective) -> Iterator[tuple[str, Result]]:
    """Each finding by its name. Rank 0 begins, when it likes; both are connected until both are done."""
    exchanged = _exchange(sock, secret, first=rank == 0)
    yield "pair", exchanged
    if exchanged.verdict is Verdict.PASSED:
        yield "pair-collective", _reduce(sock, secret, rank, collective)


def _exchange(sock: socket.socket, secret: bytes, *, first: bool) -> Result:
    """Pings, then data one way and back; both sides take the times."""
    try:
        ping_s = _pings(sock, first)
        began = time.monotonic()
        right = _data(sock, secret, first)
        rate = 2 * BYTES / 1e6 / (time.monotonic() - began)
    except OSError as error:
        return blame(f"the exchange broke off: {error}", Remedy.DRAIN, "broken")
    if not right:
        return failed("other bytes came from the other node than it sent", Remedy.REPLACE, "wrong")
    return passed(f"{BYTES >> 20} MiB each way, {rate:.4g} MB/s, there and back in {1000 * ping_s:.2g} ms")


def _pings(sock: socket.socket, first: bool) -> float:
    times = []
    sock.settimeout(TALK_S if first else ANSWER_S)  # the first bears its loads before; its death is known at once
    for _ in range(PINGS):
        began = time.monotonic()
        if first:
            sock.sendall(_ONE)
        if sock.recv(1) != _ONE:
            raise OSError("no answer")
        if not first:
            sock.sendall(_ONE)
        sock.settimeout(TALK_S)
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


def _reduce(sock: socket.socket, secret: bytes, rank: int, collective: Collective) -> Result:
    """With what both can do. Where one of them has no torch nothing is known, and both say so."""
    kind, why = collective.kind()
    try:
        send(sock, {"kind": kind, "why": why})
        sock.settimeout(LOAD_S + TALK_S)
        theirs = _next(sock)
    except (OSError, BadFrame) as error:
        return blame(f"the other node left before the all-reduce: {error}", Remedy.DRAIN, "broken")
    if not kind:
        return unknown(f"{why}: bytes were exchanged, but no all-reduce was tried")
    if theirs.get("kind") not in ("gloo", "nccl"):
        return unknown(f"the other node: {theirs.get('why')}: bytes were exchanged, but no all-reduce was tried")
    return collective.together(sock, rank, kind if kind == theirs["kind"] else "gloo", secret)


def _next(sock: socket.socket) -> Message:
    """The next message; byte by byte, for what follows may be for another process."""
    reader = Reader(4096)
    while data := sock.recv(1):
        for message in reader.feed(data):
            return message
    raise OSError("closed")
