"""A server that authenticates its peers and then exchanges sealed messages with them.

The number of unauthenticated peers is limited, and so are the bytes and the time for each of them. They receive only
the greeting. A refused peer has no effect on others. The program that uses the server decides which peers with a valid
proof are admitted (`MessageHandler.admit`).
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dalsegno.wire.bounds import Allowance, WaitingConnections
from dalsegno.wire.frames import BadFrame, EncodedMessage, Message, Reader, pack, parse
from dalsegno.wire.handshake import MAX_SEALED_BYTES, ServerHandshake, Session

if TYPE_CHECKING:
    import asyncio  # not imported at run time, because snapshot keepers do not need it

ACCEPT_AT_ONCE = 64  # connections accepted per turn, so that a flood of them does not delay admitted peers
ACCEPT_S = 0.01  # time per turn for new connections, so that slow greetings do not delay admitted peers
FULL_PAUSE_S = 0.2  # length of the pause if no file descriptor is left and no unauthenticated peer can be disconnected
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
Ready = Callable[[int], None]  # called with the socket's events
W = TypeVar("W")  # type of a peer's identity


class Watcher(Protocol):
    """The event loop that a server runs in."""

    def watch(self, sock: socket.socket, events: int, ready: Ready) -> None:
        """Call `ready` for exactly these events of the socket, instead of the events requested before."""

    def unwatch(self, sock: socket.socket) -> None: ...

    def at(self, when: float, do: Callable[[], object]) -> None:
        """Call `do` at this monotonic time. A loop that calls `BoundedServer.wake` on time may ignore this."""


class SelectorWatcher:
    """A watcher on a selector.

    The program's loop calls the `data` of each ready key with the events. It also calls `BoundedServer.wake` at the
    deadline that the last call returned.
    """

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
        """Do nothing, because the loop calls `wake`, which returns the next deadline."""


class LoopWatcher:
    """Watches sockets and deadlines with an asyncio loop."""

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
    """The limits of a server. Byte limits are per message."""

    unauthenticated: int = 256  # maximum number of unauthenticated connections
    unauthenticated_s: float = 3.0  # time limit for the handshake, which takes one packet each way
    unauthenticated_bytes: int = 2048
    message_bytes: int = MAX_SEALED_BYTES
    unsent_bytes: int = 16 << 20  # maximum number of bytes queued for one peer
    read_bytes: int = 64 << 10  # maximum size of one read
    burst: float = float("inf")  # messages that a peer may send at once
    per_s: float = float("inf")


@dataclass(frozen=True)
class Proved(Generic[W]):
    """The identity that a peer has proved, and its session."""

    who: W
    session: Session


class MessageHandler(Protocol[W]):
    """The program that uses a server."""

    def greeting(self) -> Message:
        """Return the fields to send to unauthenticated peers in addition to the nonce."""

    def identify(self, hello: Message, handshake: ServerHandshake) -> Proved[W]:
        """Return the identity that a peer proves in its first message; raise BadFrame if the proof is invalid."""

    def admit(self, peer: Connection[W], who: W) -> str:
        """Return why this peer is refused, or "" to admit it."""

    def on_connect(self, peer: Connection[W]) -> None: ...

    def on_message(self, peer: Connection[W], message: Message) -> None: ...

    def on_disconnect(self, peer: Connection[W]) -> None: ...

    def on_refused(self, cause: str, detail: str) -> None:
        """Log that a peer was refused."""


@dataclass(eq=False)
class Connection(Generic[W]):
    """One peer's connection. `who` is None until the peer has authenticated."""

    sock: socket.socket
    address: str
    until: float  # monotonic deadline for authentication
    reader: Reader
    allowance: Allowance
    handshake: ServerHandshake
    who: W | None = None
    session: Session | None = None
    unsent: bytearray = field(default_factory=bytearray)
    open: bool = True
    writing: bool = False

    @property
    def owner(self) -> str:
        return self.address

    def queue(self, message: Message | EncodedMessage) -> None:
        self.unsent += self.session.closer.close(message) if self.session else pack(message)


class BoundedServer(Generic[W]):
    """Listens, authenticates peers, and passes messages from admitted peers to its handler.

    `peer_side` and `own_side` name the two sides in proofs and seals, so that no message can be reflected.
    """

    def __init__(
        self, watcher: Watcher, host: MessageHandler[W], peer_side: str, own_side: str, limits: ServerLimits
    ) -> None:
        self._watcher, self._host, self._limits = watcher, host, limits
        self._peer_side, self._own_side = peer_side, own_side
        self.unauthenticated: WaitingConnections[Connection[W]] = WaitingConnections(limits.unauthenticated)
        self._listener: socket.socket | None = None
        self._paused_until, self._reminded = 0.0, False

    def listen(self, host: str, port: int) -> int:
        """Listen and return the port. Port 0 selects a free port. Raise OSError if the port is in use."""
        listener = socket.create_server((host, port), backlog=1024)
        self.listen_on(listener)
        return int(listener.getsockname()[1])

    def listen_on(self, listener: socket.socket) -> None:
        """Accept connections on a listening socket."""
        self._listener = listener
        listener.setblocking(False)
        self._watcher.watch(listener, READ, lambda events: self._accept())

    def close(self) -> None:
        """Stop listening, and close all unauthenticated connections. Admitted peers stay connected."""
        for peer in self.unauthenticated.all():
            self._refuse(peer)
        if self._listener is not None:
            self._watcher.unwatch(self._listener)
            self._listener.close()
            self._listener = None

    def wake(self, now: float) -> float | None:
        """Disconnect overdue unauthenticated peers and end an expired pause; return the next deadline (monotonic)."""
        for peer in self.unauthenticated.overdue(now):
            self._host.on_refused("a peer that did not authenticate in time", peer.address)
            self._refuse(peer)
        if self._paused_until and now >= self._paused_until and self._listener is not None:
            self._paused_until = 0.0
            self._watcher.watch(self._listener, READ, lambda events: self._accept())
        due = [at for at in (self.unauthenticated.next_deadline(), self._paused_until or None) if at is not None]
        return min(due, default=None)

    def send(self, peer: Connection[W], message: Message | EncodedMessage) -> None:
        """Send a message to a peer. If that fails, the connection is closed."""
        if peer.open:
            peer.queue(message)
            self._try(peer, self._flush)

    def drop(self, peer: Connection[W]) -> None:
        """Close a connection at once, without flushing, because a dead host would never read the rest."""
        if peer.open:
            peer.open = False
            self.unauthenticated.remove(peer)
            self._watcher.unwatch(peer.sock)
            peer.sock.close()

    def detach(self, peer: Connection[W]) -> socket.socket:
        """Stop serving an authenticated peer and return its socket, now with a timeout. Its session stays valid.

        Raise BadFrame if the peer has sent anything after its proof, because that data would be lost.
        """
        if not peer.reader.is_empty:
            raise BadFrame("the peer sent data after its proof")
        peer.open = False
        self._watcher.unwatch(peer.sock)
        try:
            peer.sock.settimeout(self._limits.unauthenticated_s)
            peer.sock.sendall(peer.unsent)
        except OSError:
            peer.sock.close()
            raise
        return peer.sock

    # Unauthenticated connections

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
                return  # no connection is waiting, or the peer has closed it already
            self._greet(sock, str(address[0]))

    def _make_room(self) -> None:
        """Refuse the oldest unauthenticated peer to free a file descriptor. If there is none, stop accepting for a
        while, so that the event loop is not woken without end."""
        oldest = self.unauthenticated.oldest()
        if oldest is not None:
            self._refuse(oldest)
        elif self._listener is not None:
            self._paused_until = time.monotonic() + FULL_PAUSE_S
            self._watcher.unwatch(self._listener)
            self._remind(self._paused_until)

    def _remind(self, when: float) -> None:
        """Set a timer if none is set, so that many unauthenticated peers share one timer."""
        if not self._reminded:
            self._reminded = True
            self._watcher.at(when, self._reminder)

    def _reminder(self) -> None:
        self._reminded = False
        due = self.wake(time.monotonic())
        if due is not None:
            self._remind(due)

    def _greet(self, sock: socket.socket, address: str) -> None:
        limits, until = self._limits, time.monotonic() + self._limits.unauthenticated_s
        allowance = Allowance(limits.burst, limits.per_s)
        handshake = ServerHandshake(self._own_side, self._peer_side)
        peer: Connection[W] = Connection(
            sock, address, until, Reader(limits.unauthenticated_bytes), allowance, handshake
        )
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        excess = self.unauthenticated.add(peer)
        self._watcher.watch(sock, READ, lambda events: self._ready(peer, events))
        if excess is not None:
            self._host.on_refused("too many peers that have not authenticated", excess.address)
            self._refuse(excess)
        self._remind(until)
        self._try(peer, lambda peer: peer.queue({**self._host.greeting(), **handshake.greeting()}))
        self._try(peer, self._flush)

    def _identify(self, peer: Connection[W], hello: Message) -> None:
        proved = self._host.identify(hello, peer.handshake)
        if why := self._host.admit(peer, proved.who):
            self._host.on_refused(why, peer.address)
            self._refuse(peer)
            return
        self.unauthenticated.remove(peer)
        peer.queue(peer.handshake.welcome(proved.session))
        peer.who, peer.session, peer.reader.max_bytes = proved.who, proved.session, self._limits.message_bytes
        self._host.on_connect(peer)

    # Events of all connections

    def _ready(self, peer: Connection[W], events: int) -> None:
        if not peer.open:
            return  # the peer was dropped in this turn to make room for another one
        if events & READ:
            self._try(peer, self._receive)
        if peer.unsent or peer.writing:
            self._try(peer, self._flush)

    def _receive(self, peer: Connection[W]) -> None:
        try:
            data = peer.sock.recv(self._limits.read_bytes)
        except BlockingIOError:
            return
        if not data:
            raise OSError("closed")
        for body in peer.reader.bodies(data):
            if peer.session is None:
                self._identify(peer, parse(body))
            elif not peer.allowance.spend():
                raise BadFrame("the peer sends too many messages")
            else:
                self._host.on_message(peer, peer.session.opener.open(body))
            if not peer.open:
                return

    def _flush(self, peer: Connection[W]) -> None:
        """Send as much as the socket accepts. Raise OSError if the socket is closed or the peer reads too slowly."""
        if not peer.open:
            return
        if peer.unsent:
            with contextlib.suppress(BlockingIOError):
                del peer.unsent[: peer.sock.send(peer.unsent)]
        if len(peer.unsent) > self._limits.unsent_bytes:
            raise OSError("the peer reads too slowly")
        if bool(peer.unsent) != peer.writing:
            peer.writing = bool(peer.unsent)
            self._watcher.watch(
                peer.sock, READ | (WRITE if peer.writing else 0), lambda events: self._ready(peer, events)
            )

    def _try(self, peer: Connection[W], step: Callable[[Connection[W]], None]) -> None:
        if not peer.open:
            return
        try:
            step(peer)
        except BadFrame as error:
            self._host.on_refused(f"a message of {self._name(peer)}", str(error))
            self._refuse(peer)
        except OSError:
            self._refuse(peer)
        except Exception:  # a message from one peer must not stop the service for the others
            self._host.on_refused(f"a message of {self._name(peer)}, which was not handled", traceback.format_exc())
            self._refuse(peer)

    def _name(self, peer: Connection[W]) -> str:
        return peer.address if peer.who is None else str(peer.who)

    def _refuse(self, peer: Connection[W]) -> None:
        known = peer.open and peer.who is not None
        self.drop(peer)
        if known:
            self._host.on_disconnect(peer)
