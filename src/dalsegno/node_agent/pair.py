"""Tests of a pair of connected nodes: data in both directions, and an all-reduce. Both nodes get the result."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator

from dalsegno.health.checks.late import blame
from dalsegno.health.result import Remedy, Result, Verdict, failed, passed, unknown
from dalsegno.health.settings import ANSWER_S
from dalsegno.node_agent.collective import LOAD_S, Collective
from dalsegno.node_agent.loads import receive_pattern, send_pattern
from dalsegno.wire.bounds import WaitingConnections
from dalsegno.wire.frames import BadFrame, Message, Reader, pack, send
from dalsegno.wire.handshake import holds, nonce, prove

BYTES = 32 << 20  # each way
TALK_S = 20.0
PINGS = 20
_ONE = b"!"


def try_together(sock: socket.socket, secret: bytes, rank: int, collective: Collective) -> Iterator[tuple[str, Result]]:
    """Yield each finding by name. Rank 0 starts at any time; the connection stays open until both are done."""
    exchanged = _exchange(sock, secret, first=rank == 0)
    yield "pair", exchanged
    if exchanged.verdict is Verdict.PASSED:
        yield "pair-collective", _reduce(sock, secret, rank, collective)


def _exchange(sock: socket.socket, secret: bytes, *, first: bool) -> Result:
    """Exchange pings, then data in both directions; both sides measure the times."""
    try:
        ping_s = _pings(sock, first)
        began = time.monotonic()
        right = _data(sock, secret, first)
        rate = 2 * BYTES / 1e6 / (time.monotonic() - began)
    except OSError as error:
        return blame(f"the exchange failed: {error}", Remedy.DRAIN, "broken")
    if not right:
        return failed("received other bytes than the other node sent", Remedy.REPLACE, "wrong")
    return passed(f"{BYTES >> 20} MiB each way, {rate:.4g} MB/s, round trip {1000 * ping_s:.2g} ms")


def _pings(sock: socket.socket, first: bool) -> float:
    times = []
    sock.settimeout(TALK_S if first else ANSWER_S)  # the first is tested alone before; its end is noticed at once
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
    """Return whether the right data was received on both sides."""
    if first:
        send_pattern(sock, secret + b" out", BYTES)
        right = receive_pattern(sock, secret + b" back", BYTES)
    else:
        right = receive_pattern(sock, secret + b" out", BYTES)
        if not right:
            return False  # the other side notices that the connection ends
        send_pattern(sock, secret + b" back", BYTES)
    sock.sendall(b"+" if right else b"-")
    return sock.recv(1) == b"+" and right


def _reduce(sock: socket.socket, secret: bytes, rank: int, collective: Collective) -> Result:
    """Reduce with a backend that both have. If one of them has no torch, the result is unknown on both."""
    kind, why = collective.kind()
    try:
        send(sock, {"kind": kind, "why": why})
        sock.settimeout(LOAD_S + TALK_S)
        theirs = _next(sock)
    except (OSError, BadFrame) as error:
        return blame(f"the other node left before the all-reduce: {error}", Remedy.DRAIN, "broken")
    if not kind:
        return unknown(f"{why}: data was exchanged, but no all-reduce was run")
    if theirs.get("kind") not in ("gloo", "nccl"):
        return unknown(f"the other node: {theirs.get('why')}: data was exchanged, but no all-reduce was run")
    return collective.together(sock, rank, kind if kind == theirs["kind"] else "gloo", secret)


def _next(sock: socket.socket) -> Message:
    """Return the next message, read byte by byte: what follows may be for another process."""
    reader = Reader(4096)
    while data := sock.recv(1):
        for message in reader.feed(data):
            return message
    raise OSError("closed")


# Connecting two nodes for a test: one listens, the other connects, and both prove that they know the secret that the
# controller made for this test. The connection is theirs alone, unless an attacker in the network changes the data.


KNOCK_S = 30.0  # for the other to connect and authenticate: both machines may be busy
MOST_CALLERS = 64
_LISTENER, _DIALLER = "listener", "dialler"


class NotMet(Exception):
    """The two nodes could not connect; `result` says why."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.result = blame(text, Remedy.DRAIN, code)


def answer(address: str, secret: bytes, listens: Callable[[int], None], knock_s: float = KNOCK_S) -> socket.socket:
    """Wait for the other node; `listens` is called with the port. Callers without the secret cannot block it."""
    listener = _Listener(address, secret)
    listens(listener.port)
    with listener:
        until = time.monotonic() + knock_s
        while (left := until - time.monotonic()) > 0:
            if found := listener.hear(left):
                return found
    called = f"; {listener.strangers} other callers did not know the secret" if listener.strangers else ""
    raise NotMet(f"the other node did not connect{called}", "unreachable")


def call(address: str, port: int, secret: bytes, knock_s: float = KNOCK_S) -> socket.socket:
    """Connect to the node that listens."""
    try:
        sock = socket.create_connection((address, port), knock_s)
    except OSError as error:
        raise NotMet(f"{address} cannot be reached: {error.strerror or error}", "unreachable") from error
    handshake = _Handshake(sock, secret, _DIALLER, _LISTENER)
    until = time.monotonic() + knock_s
    while handshake.known is None and (left := until - time.monotonic()) > 0:
        handshake.hear(left)
    if handshake.known is None:
        sock.close()
        raise NotMet(f"{address} did not answer within {knock_s:g} s", "unreachable")
    if not handshake.known:
        sock.close()
        raise NotMet(f"{address} does not know the secret of this test", "stranger")
    return sock


class _Listener:
    """The listening side. It handles callers in parallel; if there are too many, the busiest address loses one."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret, self._selector, self._handshakes = (
            secret,
            selectors.DefaultSelector(),
            WaitingConnections[_Handshake](MOST_CALLERS),
        )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self._selector.register(self._server, selectors.EVENT_READ)
        self.port, self.strangers = int(self._server.getsockname()[1]), 0

    def __enter__(self) -> _Listener:
        return self

    def __exit__(self, *why: object) -> None:
        for handshake in self._handshakes.all():
            handshake.sock.close()
        self._server.close()
        self._selector.close()

    def hear(self, most_s: float) -> socket.socket | None:
        """Handle the next message; return the connection of a caller that has authenticated."""
        for key, _ in self._selector.select(most_s):
            handshake: _Handshake = key.data or self._accept()
            if key.data and handshake in self._handshakes:
                handshake.hear(0.0)
            if handshake.known:
                self._handshakes.remove(handshake)
                return handshake.sock
            if handshake.known is False:
                self._drop(handshake)
        return None

    def _accept(self) -> _Handshake:
        sock, address = self._server.accept()
        handshake = _Handshake(sock, self._secret, _LISTENER, _DIALLER, str(address[0]))
        excess = self._handshakes.add(handshake)
        self._selector.register(handshake.sock, selectors.EVENT_READ, handshake)
        if excess is not None:
            self._drop(excess)
        return handshake

    def _drop(self, handshake: _Handshake) -> None:
        self.strangers += 1
        self._handshakes.remove(handshake)
        self._selector.unregister(handshake.sock)
        handshake.sock.close()


class _Handshake:
    """One handshake: two nonces, then two proofs. `known` is None until it is decided."""

    def __init__(self, sock: socket.socket, secret: bytes, we: str, they: str, owner: str = "") -> None:
        self.sock, self._secret, self._we, self._they = sock, secret, we, they
        self.owner, self.until = owner, float("inf")  # the address that is charged, for as long as the test waits
        self._ours, self._theirs, self._reader = nonce(), "", Reader(512)
        self.known: bool | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send({"nonce": self._ours})

    def hear(self, most_s: float) -> None:
        """Read what has arrived, byte by byte: what follows the proof is for someone else."""
        try:
            self.sock.settimeout(most_s)
            while self.known is None:
                if not (data := self.sock.recv(1)):
                    self.known = False
                for message in self._reader.feed(data):
                    self._take(message)
        except (BlockingIOError, TimeoutError):
            pass
        except (OSError, BadFrame):
            self.known = False
        self.sock.setblocking(True)

    def _take(self, message: Message) -> None:
        if self._theirs:
            self.known = holds(message.get("proof"), self._secret, self._they, self._ours, self._theirs)
            return
        theirs = message.get("nonce")
        if not isinstance(theirs, str) or len(theirs) != 32 or not theirs.isalnum() or theirs == self._ours:
            self.known = False
            return
        self._theirs = theirs
        self._send({"proof": prove(self._secret, self._we, theirs, self._ours)})

    def _send(self, message: Message) -> None:
        """Send a message that is short enough for the kernel to accept at once."""
        try:
            self.sock.send(pack(message))
        except OSError:
            self.known = False
