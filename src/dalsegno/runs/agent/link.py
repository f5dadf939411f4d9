"""The agent's connection to its coordinator: handshake, encryption, reconnection.

    coordinator  {"nonce": S, ...}
    agent        {"run", "agent", "nonce": C, "proof"}, then its sealed hello
    coordinator  {"proof"}, then its sealed messages

All later messages are sealed, that is, encrypted and authenticated (`wire/handshake.py`), because the environment of a
run and the output of its workers are private.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dalsegno.wire.client import read_frame
from dalsegno.wire.frames import BadFrame, Message, Reader, pack, parse
from dalsegno.wire.handshake import MAX_SEALED_BYTES, ClientHandshake, Session

AGENT, COORDINATOR = "run-agent/3", "coordinator/3"  # names of the two sides, with the protocol version
CONNECT_S = 1.0
TALK_S = 5.0
_MAX_UNPROVED_BYTES = 8 << 10  # limit per message before authentication; a greeting may contain a munge credential
_FALLBACKS = 4
_FIRST_PORT, _PORTS = 20_000, 12_000  # below Linux's default range of ephemeral ports


def fallback_ports(secret: bytes) -> tuple[int, ...]:
    """Return the ports that a restarted coordinator tries if another process has taken its old port.

    The coordinator and its agents derive the ports from the run's secret, so that they need not be announced. Another
    process that listens on such a port cannot prove that it knows the secret.
    """
    digest = hmac.digest(secret, b"fallback ports", "sha256")
    words = (int.from_bytes(digest[at : at + 4], "big") for at in range(0, 4 * _FALLBACKS, 4))
    return tuple(_FIRST_PORT + word % _PORTS for word in words)


class CoordinatorLink:
    """The connection to the coordinator. `connect` opens it, and reopens it after it breaks.

    `send` never raises, because the next hello repeats what was lost with the connection. If an agent does not have the
    run's secret, `unlock` decrypts the secret from the coordinator's greeting.
    """

    def __init__(
        self,
        secret: bytes,
        addresses: Sequence[str],
        port: int,
        name: str,
        unlock: Callable[[Message], bytes] | None = None,
    ) -> None:
        self._unlock = unlock
        self.secret, self.addresses, self.port, self.name = secret, tuple(addresses), port, name
        self.sock: socket.socket | None = None
        self.peer = ""  # the address at which the coordinator was last found
        self._silent_host = False  # whether the last attempt ended before the host accepted the connection
        self._stalled: list[tuple[str, int]] = []  # addresses and ports that accepted but sent nothing, oldest first
        self.last_seen = time.monotonic()
        self._reader = Reader(MAX_SEALED_BYTES)
        self.session: Session  # session of the current connection, or of the last one
        self.on_close: Callable[[], None] = lambda: None

    def connect(self, hello: Message) -> bool:
        """Try each address and port once and return whether one of them was the coordinator.

        If a process accepts the connection but sends no greeting, return False at once. Later calls try such ports
        last, and only one of them per call, so that they do not delay the search on other ports.
        """
        silent: set[str] = set()
        for address, port in self._places():
            if address in silent:
                continue
            try:
                self._dial(address, port, hello)
            except TimeoutError:
                self.close()
                if not self._silent_host:
                    self._stalled.append((address, port))
                    return False
                silent.add(address)  # the host does not answer, so do not try its other ports
            except (OSError, BadFrame, KeyError):
                self.close()
            else:
                self.port, self._stalled = port, []
                return True
        return False

    def _places(self) -> list[tuple[str, int]]:
        fallbacks = fallback_ports(self.secret) if self._unlock is None else ()
        addresses = dict.fromkeys((self.peer or self.addresses[0], *self.addresses))
        places = [(address, port) for address in addresses for port in dict.fromkeys((self.port, *fallbacks))]
        fresh = [place for place in places if place not in self._stalled]
        return [*fresh, *(self._stalled.pop(0) for _ in self._stalled[:1])]

    def _dial(self, address: str, port: int, hello: Message) -> None:
        self._silent_host = True
        self.sock = socket.create_connection((address, port), CONNECT_S)
        self._silent_host = False
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake, until = ClientHandshake(AGENT, COORDINATOR), time.monotonic() + TALK_S
        greeting = parse(read_frame(self.sock, _MAX_UNPROVED_BYTES, until))
        if self._unlock is not None:
            self.secret = self._unlock(greeting)
        proof = handshake.answer(greeting, self.secret, str(hello["run"]), self.name)
        opening = {"run": hello["run"], "agent": self.name, **proof}
        self.sock.sendall(pack(opening) + handshake.session.closer.close(hello))
        self.session = handshake.finish(parse(read_frame(self.sock, _MAX_UNPROVED_BYTES, until)))
        self.sock.settimeout(TALK_S)
        self._reader, self.peer, self.last_seen = Reader(MAX_SEALED_BYTES), address, time.monotonic()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; close the connection if the coordinator has closed it."""
        assert self.sock is not None
        try:
            data = self.sock.recv(262144)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        self.last_seen = time.monotonic()
        messages = self._opened(data)
        if not data:
            self.close()
        return messages

    def _opened(self, data: bytes) -> list[Message]:
        """Return the messages that these bytes complete. Close the connection if a message is not authentic."""
        messages: list[Message] = []
        try:
            for body in self._reader.bodies(data):
                messages.append(self.session.opener.open(body))
        except BadFrame:
            self.close()
        return messages

    def send(self, message: Message) -> bool:
        """Send a message; return False if the connection is broken. If the message is too long, send a note instead."""
        if self.sock is None:
            return False
        try:
            sealed = self.session.closer.close(message)
        except BadFrame as error:
            keys = ", ".join(f"`{key}`" for key in message)
            note = f"{self.name} dropped a message ({keys}): {error}"[:1000]
            sealed = self.session.closer.close({"note": note})
        try:
            self.sock.sendall(sealed)
        except OSError:
            self.close()
            return False
        return True

    def finish(self) -> None:
        """Close the connection once the coordinator has read everything.

        If a socket is closed with unread data, the kernel discards the data that it has not sent yet.
        """
        until = time.monotonic() + TALK_S
        with contextlib.suppress(OSError):
            if self.sock is not None:
                self.sock.shutdown(socket.SHUT_WR)
                self.sock.settimeout(TALK_S)
                while self.sock.recv(262144) and time.monotonic() < until:
                    pass
        self.close()

    def close(self) -> None:
        if self.sock is not None:
            self.on_close()
            with contextlib.suppress(OSError):
                self.sock.close()
            self.sock = None


# Heartbeats: small signed datagrams, sent by a separate thread so that the agent's other work does not delay them


INTERVAL_S = 0.1
_HEAD = struct.Struct("!QB")
_MAC_BYTES = 8
MAX_BEAT_BYTES = _HEAD.size + 255 + _MAC_BYTES


class Heartbeat(NamedTuple):
    sender: str
    number: int


def beat_key(session: Session) -> bytes:
    """Return the key for the heartbeats of one connection."""
    text = "\0".join(("heartbeats", *session.transcript))
    return hmac.digest(session.secret, text.encode(errors="surrogatepass"), "sha256")


def pack_beat(key: bytes, beat: Heartbeat) -> bytes:
    name = beat.sender.encode()
    body = _HEAD.pack(beat.number, len(name)) + name
    return body + _mac(key, body)


def read_beat(key: bytes, data: bytes) -> Heartbeat | None:
    """Return the heartbeat in a datagram; None if the datagram is invalid or not signed with this key."""
    beat = peek_beat(data)
    return beat if beat is not None and is_signed(key, data) else None


def peek_beat(data: bytes) -> Heartbeat | None:
    """Return the heartbeat in a datagram, without the costly check of its signature.

    Return None if the datagram cannot contain a heartbeat.
    """
    if not _HEAD.size + _MAC_BYTES <= len(data) <= MAX_BEAT_BYTES:
        return None
    number, length = _HEAD.unpack_from(data)
    name = data[_HEAD.size : -_MAC_BYTES]
    return Heartbeat(name.decode(errors="replace"), number) if len(name) == length else None


def is_signed(key: bytes, data: bytes) -> bool:
    return hmac.compare_digest(data[-_MAC_BYTES:], _mac(key, data[:-_MAC_BYTES]))


def _mac(key: bytes, body: bytes) -> bytes:
    # The prefix prevents the use of this MAC as a proof or in a sealed message.
    return hmac.digest(key, b"beat\0" + body, "sha256")[:_MAC_BYTES]


class _CoordinatorAddress(NamedTuple):
    """A coordinator's address, and the heartbeat key of the connection to it."""

    host: str
    port: int
    key: bytes


class HeartbeatSender:
    """Sends heartbeats to the coordinator. `last_seen` is the monotonic time of the coordinator's last answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last_seen = time.monotonic()
        self.interval_s = INTERVAL_S
        self._target: _CoordinatorAddress | None = None
        self._number = time.time_ns()  # increases across agent restarts, so that a replayed heartbeat has an old number
        self._answered = self._number
        self._socket: socket.socket | None = None
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def aim(self, host: str, port: int, key: bytes) -> None:
        """Send heartbeats to this address from now on, signed with this key."""
        self.last_seen = time.monotonic()
        self._target = _CoordinatorAddress(host, port, key)

    def _live(self) -> None:
        while True:
            target = self._target
            if target is None:
                time.sleep(INTERVAL_S)
                continue
            with contextlib.suppress(OSError):  # there may be no route now; a later heartbeat may arrive
                self._open(target)
                self._send(target)
                self._listen(target.key)

    def _open(self, target: _CoordinatorAddress) -> None:
        if self._socket is None:
            family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_DGRAM)

    def _send(self, target: _CoordinatorAddress) -> None:
        assert self._socket is not None
        self._number += 1
        try:
            data = pack_beat(target.key, Heartbeat(self.name, self._number))
            self._socket.sendto(data, (target.host, target.port))
        except OSError:
            time.sleep(INTERVAL_S)
            raise

    def _listen(self, key: bytes) -> None:
        """Receive answers until the next heartbeat is due."""
        assert self._socket is not None
        due = time.monotonic() + self.interval_s
        while (left := due - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with contextlib.suppress(socket.timeout, OSError):
                beat = read_beat(key, self._socket.recv(512))
                if beat is not None and not beat.sender and self._answered < beat.number <= self._number:
                    self._answered, self.last_seen = beat.number, time.monotonic()
