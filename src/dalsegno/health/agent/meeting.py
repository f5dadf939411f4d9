"""How two nodes find each other for a test: one waits on a port of its own, the other calls, and both prove that they
know the secret that the controller gave them for this once. From then on the connection is theirs alone, unless
somebody sits in the network between them and changes what passes.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from dalsegno.health.checks.late import blame
from dalsegno.health.result import Remedy
from dalsegno.train.frames import BadFrame, Message, Reader, pack
from dalsegno.train.proof import holds, nonce, prove
from dalsegno.wire.bounds import Waiting

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
        self._secret, self._selector, self._talks = secret, selectors.DefaultSelector(), Waiting[_Talk](MOST_CALLERS)
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
