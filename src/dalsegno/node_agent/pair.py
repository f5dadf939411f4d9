"""What two nodes that have met try together: bytes there and back, and an all-reduce. Both are told what came of it."""

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


# ---- How two nodes find each other for a test: one waits on a port of its own, the other calls, and both prove
# that they know the secret that the controller gave them for this once. From then on the connection is theirs
# alone, unless somebody sits in the network between them and changes what passes.


KNOCK_S = 30.0  # for the other to call, and for its proof: both machines may be busy
MOST_CALLERS = 64
_LISTENER, _DIALLER = "listener", "dialler"


class NotMet(Exception):
    """The two do not come together; `result` says why."""

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.result = blame(text, Remedy.DRAIN, code)


def answer(address: str, secret: bytes, listens: Callable[[int], None], knock_s: float = KNOCK_S) -> socket.socket:
    """Wait for the other node; `listens` is told the port. Those who do not know the secret cannot keep it out."""
    door = _Door(address, secret)
    listens(door.port)
    with door:
        until = time.monotonic() + knock_s
        while (left := until - time.monotonic()) > 0:
            if found := door.hear(left):
                return found
    called = f"; {door.strangers} called who do not know the secret" if door.strangers else ""
    raise NotMet(f"the other node did not come{called}", "unreachable")


def call(address: str, port: int, secret: bytes, knock_s: float = KNOCK_S) -> socket.socket:
    """Call the node that waits."""
    try:
        sock = socket.create_connection((address, port), knock_s)
    except OSError as error:
        raise NotMet(f"{address} cannot be reached: {error.strerror or error}", "unreachable") from error
    talk = _Talk(sock, secret, _DIALLER, _LISTENER)
    until = time.monotonic() + knock_s
    while talk.known is None and (left := until - time.monotonic()) > 0:
        talk.hear(left)
    if talk.known is None:
        sock.close()
        raise NotMet(f"{address} did not answer within {knock_s:g} s", "unreachable")
    if not talk.known:
        sock.close()
        raise NotMet(f"{address} does not know the secret of this test", "stranger")
    return sock


class _Door:
    """All callers are heard side by side; of too many, the address with the most of them loses its oldest."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret, self._selector, self._talks = (
            secret,
            selectors.DefaultSelector(),
            WaitingConnections[_Talk](MOST_CALLERS),
        )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family)
        self._selector.register(self._server, selectors.EVENT_READ)
        self.port, self.strangers = int(self._server.getsockname()[1]), 0

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *why: object) -> None:
        for talk in self._talks.all():
            talk.sock.close()
        self._server.close()
        self._selector.close()

    def hear(self, most_s: float) -> socket.socket | None:
        """Whoever speaks next; the connection of one who is known now."""
        for key, _ in self._selector.select(most_s):
            talk: _Talk = key.data or self._greet()
            if key.data and talk in self._talks:
                talk.hear(0.0)
            if talk.known:
                self._talks.remove(talk)
                return talk.sock
            if talk.known is False:
                self._hang_up(talk)
        return None

    def _greet(self) -> _Talk:
        sock, address = self._server.accept()
        talk = _Talk(sock, self._secret, _LISTENER, _DIALLER, str(address[0]))
        excess = self._talks.add(talk)
        self._selector.register(talk.sock, selectors.EVENT_READ, talk)
        if excess is not None:
            self._hang_up(excess)
        return talk

    def _hang_up(self, talk: _Talk) -> None:
        self.strangers += 1
        self._talks.remove(talk)
        self._selector.unregister(talk.sock)
        talk.sock.close()


class _Talk:
    """Two nonces, then two proofs. `known` is None until it is certain."""

    def __init__(self, sock: socket.socket, secret: bytes, we: str, they: str, owner: str = "") -> None:
        self.sock, self._secret, self._we, self._they = sock, secret, we, they
        self.owner, self.until = owner, float("inf")  # the address that takes the room, for as long as the test waits
        self._ours, self._theirs, self._reader = nonce(), "", Reader(512)
        self.known: bool | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._say({"nonce": self._ours})

    def hear(self, most_s: float) -> None:
        """What has come, byte by byte: what follows the proof is not for us."""
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
        self._say({"proof": prove(self._secret, self._we, theirs, self._ours)})

    def _say(self, message: Message) -> None:
        """Few enough bytes for the kernel to take them all at once."""
        try:
            self.sock.send(pack(message))
        except OSError:
            self.known = False
