"""The server for peers that have not proved who they are, and for their sealed messages once they have.

Strangers get little: a bounded number of connections, few bytes, a short time, and one answer. What is refused
changes nothing. Who may come in, the host decides once the proof holds (`Host.admit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import selectors
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dalsegno.wire.bounds import Allowance, WaitingConnections
from dalsegno.wire.frames import BadFrame, Message, Reader, pack, parse
from dalsegno.wire.handshake import MOST_SEALED, Seal, nonce, prove

ACCEPT_AT_ONCE = 64  # a flood of callers must not hold up the peers that are in
ACCEPT_S = 0.01  # nor greetings that take their time
FULL_PAUSE_S = 0.2  # no file descriptor is left, and no stranger to take one from
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
Ready = Callable[[int], None]  # is told which events came
W = TypeVar("W")  # who a peer is


class Watcher(Protocol):
    """The loop that a server is part of."""

    def watch(self, sock: socket.socket, events: int, ready: Ready) -> None:
        """Call `ready` for these events, from now on and instead of what was watched before."""

    def unwatch(self, sock: socket.socket) -> None: ...

    def at(self, when: float, do: Callable[[], object]) -> None:
        """Call `do` at this time (monotonic), unless the loop calls `wake` by itself."""


class SelectorWatcher:
    """A loop around a selector, which calls each key's data with the events, and `wake` when it is due."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector

    def watch(self, sock: socket.socket, events: int, ready: Ready) -> None:
        try:
            self._selector.modify(sock, events, ready)
        except KeyError:
            self._selector.register(sock, events, ready)

    def unwatch(self, sock: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)

    def at(self, when: float, do: Callable[[], object]) -> None:
        """The loop asks `wake` when to come back."""


class LoopWatcher:
    """asyncio's loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def watch(self, sock: socket.socket, events: int, ready: Ready) -> None:
        if events & READ:
            self._loop.add_reader(sock, ready, READ)
        else:
            self._loop.remove_reader(sock)
        if events & WRITE:
            self._loop.add_writer(sock, ready, WRITE)
        else:
            self._loop.remove_writer(sock)

    def unwatch(self, sock: socket.socket) -> None:
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)

    def at(self, when: float, do: Callable[[], object]) -> None:
        self._loop.call_at(when, do)


@dataclass(frozen=True)
class ServerLimits:
    """What a server allows. Bytes are those of one message."""

    strangers: int = 256  # at a time
    stranger_s: float = 3.0  # for the proof: it is one packet each way
    stranger_bytes: int = 2048
    message_bytes: int = MOST_SEALED
    unsent_bytes: int = 16 << 20  # that wait for a peer to take them
    read_bytes: int = 64 << 10  # in one turn
    burst: float = float("inf")  # messages
    per_s: float = float("inf")


@dataclass(frozen=True)
class Proved(Generic[W]):
    """Who a peer has proved to be, by which secret, and what both sides have said about it."""

    who: W
    secret: bytes
    said: tuple[str, ...]


class MessageHandler(Protocol[W]):
    """The program behind a server."""

    def greeting(self) -> Message:
        """What strangers are told beside our nonce."""

    def identify(self, hello: Message, ours: str) -> Proved[W]:
        """Who a peer proves to be in its first message, given our nonce; BadFrame if it proves nothing."""

    def admit(self, peer: Connection[W], who: W) -> str:
        """Why this peer may not come in; "" if it may."""

    def came(self, peer: Connection[W]) -> None: ...

    def said(self, peer: Connection[W], message: Message) -> None: ...

    def gone(self, peer: Connection[W]) -> None: ...

    def refused(self, cause: str, detail: str) -> None:
        """A peer was sent away: for the log."""


@dataclass(eq=False)
class Connection(Generic[W]):
    """One peer's connection. `who` is None until the peer has proved it."""

    sock: socket.socket
    address: str
    until: float  # monotonic: when a stranger's time is over
    reader: Reader
    allowance: Allowance
    nonce: str = field(default_factory=nonce)
    who: W | None = None
    said: tuple[str, ...] = ()  # what both sides have proved
    unsent: bytearray = field(default_factory=bytearray)
    open: bool = True
    writing: bool = False
    opener: Seal | None = None
    closer: Seal | None = None

    @property
    def owner(self) -> str:
        return self.address

    def queue(self, message: Message) -> None:
        self.unsent += self.closer.close(message) if self.closer else pack(message)


class BoundedServer(Generic[W]):
    """Listens, has strangers prove themselves, and hands the messages of those who have to its host.

    `peer_side` and `own_side` name the two sides in proofs and seals, so that neither can be sent back.
    """

    def __init__(
        self, watcher: Watcher, host: MessageHandler[W], peer_side: str, own_side: str, limits: ServerLimits
    ) -> None:
        self._watcher, self._host, self._limits = watcher, host, limits
        self._peer_side, self._own_side = peer_side, own_side
        self.strangers: WaitingConnections[Connection[W]] = WaitingConnections(limits.strangers)
        self._listener: socket.socket | None = None
        self._paused_until, self._reminded = 0.0, False

    def listen(self, host: str, port: int) -> int:
        """Listen; returns the port, which is any free one for 0. OSError if it is taken."""
        self._listener = socket.create_server((host, port), backlog=1024)
        self._listener.setblocking(False)
        self._watcher.watch(self._listener, READ, lambda events: self._accept())
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening, and send strangers away; peers stay."""
        for stranger in self.strangers.all():
            self._refuse(stranger)
        if self._listener is not None:
            self._watcher.unwatch(self._listener)
            self._listener.close()
            self._listener = None

    def wake(self, now: float) -> float | None:
        """Send those strangers away whose time is over; returns when to look again (monotonic)."""
        for stranger in self.strangers.overdue(now):
            self._host.refused("a caller who does not say who it is", stranger.address)
            self._refuse(stranger)
        if self._paused_until and now >= self._paused_until and self._listener is not None:
            self._paused_until = 0.0
            self._watcher.watch(self._listener, READ, lambda events: self._accept())
        due = [at for at in (self.strangers.next_deadline(), self._paused_until or None) if at is not None]
        return min(due, default=None)

    def send(self, peer: Connection[W], message: Message) -> None:
        """Say something to a peer; one that does not take it is gone."""
        if peer.open:
            peer.queue(message)
            self._try(peer, lambda: self._flush(peer))

    def drop(self, peer: Connection[W]) -> None:
        """End a connection at once, and tell nobody: a host that is gone never takes what is still to be sent."""
        if peer.open:
            peer.open = False
            self.strangers.remove(peer)
            self._watcher.unwatch(peer.sock)
            peer.sock.close()

    # Strangers

    def _accept(self) -> None:
        until = time.monotonic() + ACCEPT_S
        for _ in range(ACCEPT_AT_ONCE):
            if self._listener is None or time.monotonic() > until:
                return
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno in _FULL:
                    self._make_room()
                return  # nobody is left, or gone before we looked
            self._greet(sock, str(address[0]))

    def _make_room(self) -> None:
        """Without a file descriptor the listener would be ready for ever, and the loop would spin."""
        oldest = self.strangers.oldest()
        if oldest is not None:
            self._refuse(oldest)
        elif self._listener is not None:
            self._paused_until = time.monotonic() + FULL_PAUSE_S
            self._watcher.unwatch(self._listener)
            self._remind(self._paused_until)

    def _remind(self, when: float) -> None:
        """One reminder at a time: a flood of strangers is no flood of timers."""
        if not self._reminded:
            self._reminded = True
            self._watcher.at(when, self._reminder)

    def _reminder(self) -> None:
        self._reminded = False
        due = self.wake(time.monotonic())
        if due is not None:
            self._remind(due)

    def _greet(self, sock: socket.socket, address: str) -> None:
        limits, until = self._limits, time.monotonic() + self._limits.stranger_s
        allowance = Allowance(limits.burst, limits.per_s)
        peer: Connection[W] = Connection(sock, address, until, Reader(limits.stranger_bytes), allowance)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        excess = self.strangers.add(peer)
        self._watcher.watch(sock, READ, lambda events: self._ready(peer, events))
        if excess is not None:
            self._host.refused("too many callers who do not say who they are", excess.address)
            self._refuse(excess)
        self._remind(until)
        self._try(peer, lambda: peer.queue({**self._host.greeting(), "nonce": peer.nonce}))
        self._try(peer, lambda: self._flush(peer))

    def _identify(self, peer: Connection[W], hello: Message) -> None:
        proved = self._host.identify(hello, peer.nonce)
        if why := self._host.admit(peer, proved.who):
            self._host.refused(why, peer.address)
            self._refuse(peer)
            return
        self.strangers.remove(peer)
        peer.queue({"proof": prove(proved.secret, self._own_side, *proved.said)})
        peer.opener = Seal(proved.secret, self._peer_side, *proved.said)
        peer.closer = Seal(proved.secret, self._own_side, *proved.said)
        peer.who, peer.said, peer.reader.most_bytes = proved.who, proved.said, self._limits.message_bytes
        self._host.came(peer)

    # Everyone

    def _ready(self, peer: Connection[W], events: int) -> None:
        if not peer.open:
            return  # dropped in this very turn, for another that came
        if events & READ:
            self._try(peer, lambda: self._hear(peer))
        self._try(peer, lambda: self._flush(peer))

    def _hear(self, peer: Connection[W]) -> None:
        try:
            data = peer.sock.recv(self._limits.read_bytes)
        except BlockingIOError:
            return
        if not data:
            raise OSError("closed")
        for body in peer.reader.bodies(data):
            if peer.opener is None:
                self._identify(peer, parse(body))
            elif not peer.allowance.spend():
                raise BadFrame("it says too much")
            else:
                self._host.said(peer, peer.opener.open(body))
            if not peer.open:
                return

    def _flush(self, peer: Connection[W]) -> None:
        """Send what the socket takes; OSError if it takes nothing any more, or the other side takes too little."""
        if not peer.open:
            return
        if peer.unsent:
            with contextlib.suppress(BlockingIOError):
                del peer.unsent[: peer.sock.send(peer.unsent)]
        if len(peer.unsent) > self._limits.unsent_bytes:
            raise OSError("it does not listen")
        if bool(peer.unsent) != peer.writing:
            peer.writing = bool(peer.unsent)
            self._watcher.watch(
                peer.sock, READ | (WRITE if peer.writing else 0), lambda events: self._ready(peer, events)
            )

    def _try(self, peer: Connection[W], step: Callable[[], None]) -> None:
        if not peer.open:
            return
        try:
            step()
        except BadFrame as error:
            self._host.refused(f"what {self._name(peer)} says", str(error))
            self._refuse(peer)
        except OSError:
            self._refuse(peer)
        except Exception:  # whatever one peer's words do to us, the others must go on being served
            self._host.refused(f"what {self._name(peer)} says, which went wrong here", traceback.format_exc())
            self._refuse(peer)

    def _name(self, peer: Connection[W]) -> str:
        return peer.address if peer.who is None else str(peer.who)

    def _refuse(self, peer: Connection[W]) -> None:
        known = peer.open and peer.who is not None
        self.drop(peer)
        if known:
            self._host.gone(peer)
