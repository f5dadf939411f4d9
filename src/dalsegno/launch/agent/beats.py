"""Heartbeats: small signed datagrams, sent by a thread of their own so that nothing else the agent does delays them.

They are signed with a key of the agent's present connection: what was recorded before, or is meant for another
coordinator, counts for nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from typing import NamedTuple

INTERVAL_S = 0.1
_HEAD = struct.Struct("!QB")
_MAC_BYTES = 8
MOST_BYTES = _HEAD.size + 255 + _MAC_BYTES


class Beat(NamedTuple):
    sender: str
    number: int


def beat_key(secret: bytes, *said: str) -> bytes:
    """Return the key for the heartbeats of one connection; `said` is what both sides proved, their nonces included."""
    return hmac.digest(secret, "\0".join(("heartbeats", *said)).encode(errors="surrogatepass"), "sha256")


def pack_beat(key: bytes, beat: Beat) -> bytes:
    name = beat.sender.encode()
    body = _HEAD.pack(beat.number, len(name)) + name
    return body + _mac(key, body)


def read_beat(key: bytes, data: bytes) -> Beat | None:
    """None for anything that was not signed with this key."""
    beat = peek_beat(data)
    return beat if beat is not None and is_signed(key, data) else None


def peek_beat(data: bytes) -> Beat | None:
    """What a datagram claims to be, at the cost of a look at its form; None for what cannot be a beat."""
    if not _HEAD.size + _MAC_BYTES <= len(data) <= MOST_BYTES:
        return None
    number, length = _HEAD.unpack_from(data)
    name = data[_HEAD.size : -_MAC_BYTES]
    return Beat(name.decode(errors="replace"), number) if len(name) == length else None


def is_signed(key: bytes, data: bytes) -> bool:
    return hmac.compare_digest(data[-_MAC_BYTES:], _mac(key, data[:-_MAC_BYTES]))


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.digest(key, b"beat\0" + body, "sha256")[:_MAC_BYTES]  # of no use as a proof or a seal


class _Target(NamedTuple):
    """A coordinator, and the key of the connection to it."""

    host: str
    port: int
    key: bytes


class Heart:
    """Sends beats to the coordinator, and hears its answers: `heard` is when the last one came (monotonic)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.heard = time.monotonic()
        self._target: _Target | None = None
        self._number = time.time_ns()  # grows across restarts of the agent, so that old beats stay old
        self._answered = self._number
        self._socket: socket.socket | None = None
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def aim(self, host: str, port: int, key: bytes) -> None:
        """Send there from now on, signed with this key."""
        self.heard = time.monotonic()
        self._target = _Target(host, port, key)

    def _live(self) -> None:
        while True:
            target = self._target
            if target is None:
                time.sleep(INTERVAL_S)
                continue
            with contextlib.suppress(OSError):  # no way out just now: the next one may find it
                self._open(target)
                self._send(target)
                self._listen(target.key)

    def _open(self, target: _Target) -> None:
        if self._socket is None:
            family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_DGRAM)

    def _send(self, target: _Target) -> None:
        assert self._socket is not None
        self._number += 1
        try:
            data = pack_beat(target.key, Beat(self.name, self._number))
            self._socket.sendto(data, (target.host, target.port))
        except OSError:
            time.sleep(INTERVAL_S)
            raise

    def _listen(self, key: bytes) -> None:
        """Until the next beat is due."""
        assert self._socket is not None
        due = time.monotonic() + INTERVAL_S
        while (left := due - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with contextlib.suppress(socket.timeout, OSError):
                beat = read_beat(key, self._socket.recv(512))
                if beat is not None and not beat.sender and self._answered < beat.number <= self._number:
                    self._answered, self.heard = beat.number, time.monotonic()
