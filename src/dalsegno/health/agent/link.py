"""The agent's one connection to its controller: dialled, proved, lost and dialled again. It never blocks."""

from __future__ import annotations

import contextlib
import errno
import random
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from dalsegno.health.wire import (
    AGENT,
    CONTROLLER,
    MOST_BYTES,
    STRANGER_BYTES,
    Hello,
    hello_message,
    is_welcome,
    seal_of,
)
from dalsegno.train.frames import BadFrame, Message, Reader, pack, parse
from dalsegno.train.proof import TAG_BYTES, Seal, nonce, read_nonce

HANDSHAKE_S = 4.0
UNHEARD_MS = 10_000  # what the other side's kernel does not acknowledge for so long is not heard any more
FIRST_PAUSE_S, MOST_PAUSE_S = 0.2, 3.0
SETTLED_S = 5.0  # a connection that lasted so long was a good one: the next dial is quick again
ROOM = 64 << 10  # bytes that may wait to be sent


class State(Enum):
    DOWN = "down"
    DIALLING = "dialling"
    GREETED = "waiting for the greeting"
    PROVING = "waiting for the welcome"
    UP = "up"


@dataclass(frozen=True)
class Whom:
    """Whom to call, and as whom."""

    host: str
    port: int
    secret: bytes
    hello: Hello  # its nonce is another for every call


class Link:
    """`heard` is told every message, `turned` when the link is up and when it is down again."""

    def __init__(
        self,
        whom: Whom,
        selector: selectors.BaseSelector,
        heard: Callable[[Message], None],
        turned: Callable[[bool], None],
        say: Callable[[str], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.state, self._whom = State.DOWN, whom
        self._selector, self._heard, self._turned, self._say, self._chance = selector, heard, turned, say, chance
        self._sock: socket.socket | None = None
        self._reader, self._unsent = Reader(STRANGER_BYTES), bytearray()
        self._opener: Seal | None = None
        self._closer: Seal | None = None
        self._theirs = ""
        self._due = 0.0  # when to dial, or to give up dialling (monotonic)
        self._up_at, self._pause_s = 0.0, FIRST_PAUSE_S
        self._events = 0
        self._told_why = ""
        self.address = ""  # our own, as the controller sees us

    @property
    def up(self) -> bool:
        return self.state is State.UP

    def room(self) -> bool:
        """Whether there is anybody to hear what we say, and soon."""
        return self.up and len(self._unsent) < ROOM

    def send(self, message: Message, now: float) -> None:
        """Say something; what a broken connection swallows is told again after the next."""
        if self._closer is not None:
            self._unsent += self._closer.close(message)
            self._guard(now, self._flush)

    def wake(self, now: float) -> float | None:
        """Dial when it is time, and give up what takes too long; returns when to look again."""
        if self.state is State.DOWN and now >= self._due:
            self._guard(now, lambda: self._dial(now))
        elif self.state not in (State.DOWN, State.UP) and now >= self._due:
            self._lose(now, f"no answer while {self.state.value}")
        return None if self.up else self._due

    def close(self) -> None:
        if self._sock is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    # Inside

    def _dial(self, now: float) -> None:
        self._due = now + HANDSHAKE_S
        family, kind, _, _, address = socket.getaddrinfo(self._whom.host, self._whom.port, type=socket.SOCK_STREAM)[0]
        self._sock = socket.socket(family, kind)
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
        self._reader, self._unsent = Reader(STRANGER_BYTES), bytearray()
        self._opener = self._closer = None
        self.state, self._events = State.DIALLING, selectors.EVENT_WRITE
        self._selector.register(self._sock, self._events, self._ready)
        code = self._sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, "cannot connect")

    def _ready(self, events: int, now: float) -> None:
        self._guard(now, lambda: self._step(events, now))

    def _step(self, events: int, now: float) -> None:
        assert self._sock is not None
        if self.state is State.DIALLING:
            self.address = str(self._sock.getsockname()[0])
            if code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, "cannot connect")
            self.state = State.GREETED
        if events & selectors.EVENT_READ:
            self._listen(now)
        if self.state is not State.DOWN:
            self._flush()

    def _listen(self, now: float) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        if not data:
            raise OSError(errno.ECONNRESET, "hung up")
        for body in self._reader.bodies(data):
            self._take(body, now)
            if self.state is State.DOWN:
                return

    def _take(self, body: bytes, now: float) -> None:
        if self.state is State.GREETED:
            self._theirs = read_nonce(parse(body))
            self._whom = replace(self._whom, hello=replace(self._whom.hello, nonce=nonce()))
            self._unsent += pack(hello_message(self._whom.secret, self._whom.hello, self._theirs))
            self.state = State.PROVING
        elif self.state is State.PROVING:
            if not is_welcome(parse(body), self._whom.secret, self._whom.hello, self._theirs):
                raise BadFrame("whoever answers there does not know this node's secret")
            self._come_up(now)
        elif self._opener is not None:
            self._heard(self._opener.open(body))

    def _come_up(self, now: float) -> None:
        secret, hello = self._whom.secret, self._whom.hello
        self._opener, self._closer = (seal_of(side, secret, hello, self._theirs) for side in (CONTROLLER, AGENT))
        self._reader.most_bytes = MOST_BYTES + TAG_BYTES
        self.state, self._up_at, self._told_why = State.UP, now, ""
        self._say(f"connected to {self._whom.host}:{self._whom.port}")
        self._turned(True)

    def _flush(self) -> None:
        assert self._sock is not None
        if self._unsent and self.state is not State.DIALLING:
            with contextlib.suppress(BlockingIOError):
                del self._unsent[: self._sock.send(self._unsent)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._sock, events, self._ready)

    def _guard(self, now: float, step: Callable[[], None]) -> None:
        try:
            step()
        except (OSError, BadFrame) as error:
            self._lose(now, str(error))

    def _lose(self, now: float, why: str) -> None:
        was_up = self.up
        self.close()
        self.state, self._opener, self._closer = State.DOWN, None, None
        if was_up and now - self._up_at >= SETTLED_S:
            self._pause_s = FIRST_PAUSE_S
        self._due = now + self._pause_s * (0.5 + self._chance())  # many agents must not call all at once
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)
        if why != self._told_why:
            self._say(f"no connection to {self._whom.host}:{self._whom.port}: {why}")
            self._told_why = why
        if was_up:
            self._turned(False)
