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
from dalsegno.wire.client import prove_as_client
from dalsegno.wire.frames import BadFrame, Message, Reader, send
from dalsegno.wire.handshake import ClientHandshake, ServerHandshake
from dalsegno.wire.server import BoundedServer, Connection, Proved, SelectorWatcher, ServerLimits

BYTES = 32 << 20  # number of bytes to send in each direction
TALK_S = 20.0
PINGS = 20
_ONE = b"!"


def run_pair_tests(
    sock: socket.socket, secret: bytes, rank: int, collective: Collective
) -> Iterator[tuple[str, Result]]:
    """Yield the name and result of each test. The all-reduce is run only if the exchange of data passes.

    Rank 1 waits until rank 0 starts. The connection must stay open until both ranks are done.
    """
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
    sock.settimeout(TALK_S if first else ANSWER_S)  # rank 1 also waits while rank 0 is tested alone
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
            return False  # send nothing: the caller closes the connection, and the other side notices that
        send_pattern(sock, secret + b" back", BYTES)
    sock.sendall(b"+" if right else b"-")
    return sock.recv(1) == b"+" and right


def _reduce(sock: socket.socket, secret: bytes, rank: int, collective: Collective) -> Result:
    """Run an all-reduce with a backend that both nodes have. If one node has no torch, the result is unknown on
    both."""
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
    """Return the next message. It is read byte by byte, because the bytes that follow may be for another process."""
    reader = Reader(4096)
    while data := sock.recv(1):
        for message in reader.feed(data):
            return message
    raise OSError("closed")


# Connecting two nodes for a test: one listens, the other connects, and both prove that they know the secret that the
# controller made for this test. Nobody else can use the connection, but an attacker in the network can change its data.


CONNECT_S = 30.0  # time limit for the other node to connect and authenticate; both machines may be busy
MAX_CALLERS = 64
LISTENER, DIALLER = "pair that listens/2", "pair that calls/2"


class PartnerUnreachable(Exception):
    """The two nodes could not connect; `result` says why."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.result = blame(text, Remedy.DRAIN, code)


def answer(address: str, secret: bytes, listens: Callable[[int], None], connect_s: float = CONNECT_S) -> socket.socket:
    """Wait for the other node to connect, and return the socket. `listens` is called with the port.

    Callers without the secret cannot prevent the other node from connecting.
    """
    with _PairListener(address, secret, connect_s) as listener:
        listens(listener.port)
        until = time.monotonic() + connect_s
        while listener.found is None and time.monotonic() < until:
            listener.turn(until)
        if listener.found is not None:
            return listener.found
    called = f"; callers without the secret: {listener.refusals}" if listener.refusals else ""
    raise PartnerUnreachable(f"the other node did not connect{called}", "unreachable")


def call(address: str, port: int, secret: bytes, connect_s: float = CONNECT_S) -> socket.socket:
    """Connect to the node that listens, and return the socket."""
    until = time.monotonic() + connect_s
    try:
        sock = socket.create_connection((address, port), connect_s)
    except OSError as error:
        raise PartnerUnreachable(f"{address} cannot be reached: {error.strerror or error}", "unreachable") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove_as_client(sock, ClientHandshake(DIALLER, LISTENER), secret, fields={}, until=until)
    except TimeoutError as error:
        sock.close()
        raise PartnerUnreachable(f"{address} did not answer within {connect_s:g} s", "unreachable") from error
    except (OSError, BadFrame) as error:
        sock.close()
        raise PartnerUnreachable(f"{address} does not know the secret of this test", "stranger") from error
    sock.settimeout(None)
    return sock


class _PairListener:
    """Handles callers in parallel until one proves that it knows the secret; `found` is its socket."""

    def __init__(self, address: str, secret: bytes, connect_s: float) -> None:
        self._secret, self._selector = secret, selectors.DefaultSelector()
        limits = ServerLimits(unauthenticated=MAX_CALLERS, unauthenticated_s=connect_s, unauthenticated_bytes=512)
        self._server: BoundedServer[str] = BoundedServer(
            SelectorWatcher(self._selector), self, DIALLER, LISTENER, limits
        )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        self._server.listen_on(listener)
        self.port, self.refusals = int(listener.getsockname()[1]), 0
        self.found: socket.socket | None = None

    def __enter__(self) -> _PairListener:
        return self

    def __exit__(self, *why: object) -> None:
        self._server.close()
        self._selector.close()

    def turn(self, until: float) -> None:
        """Wait for the next event and handle it."""
        due = self._server.wake(time.monotonic())
        until = until if due is None else min(until, due)
        for key, events in self._selector.select(max(0.0, until - time.monotonic())):
            key.data(events)

    # Methods that the bounded server calls

    def greeting(self) -> Message:
        return {}

    def identify(self, hello: Message, handshake: ServerHandshake) -> Proved[str]:
        return Proved("the other node", handshake.check(hello, self._secret))

    def admit(self, peer: Connection[str], who: str) -> str:
        return "" if self.found is None else "the other node is here already"

    def on_connect(self, peer: Connection[str]) -> None:
        self.found = self._server.detach(peer)
        self.found.settimeout(None)

    def on_message(self, peer: Connection[str], message: Message) -> None:
        """Do nothing: this method is never called, because an authenticated connection is detached at once."""

    def on_disconnect(self, peer: Connection[str]) -> None: ...

    def on_refused(self, cause: str, detail: str) -> None:
        self.refusals += 1
