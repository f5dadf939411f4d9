"""Heartbeats: small signed datagrams, sent by a thread of their own so that nothing else the agent does delays them."""

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


def pack_beat(secret: bytes, beat: Beat) -> bytes:
    name = beat.sender.encode()
    body = _HEAD.pack(beat.number, len(name)) + name
    return body + _mac(secret, body)


def read_beat(secret: bytes, data: bytes) -> Beat | None:
    """None for anything that was not signed with the run's secret."""
    beat = peek_beat(data)
    return beat if beat is not None and is_signed(secret, data) else None


def peek_beat(data: bytes) -> Beat | None:
    """What a datagram claims to be, at the cost of a look at its form; None for what cannot be a beat."""
    if not _HEAD.size + _MAC_BYTES <= len(data) <= MOST_BYTES:
        return None
    number, length = _HEAD.unpack_from(data)
    name = data[_HEAD.size : -_MAC_BYTES]
    return Beat(name.decode(errors="replace"), number) if len(name) == length else None


def is_signed(secret: bytes, data: bytes) -> bool:
    return hmac.compare_digest(data[-_MAC_BYTES:], _mac(secret, data[:-_MAC_BYTES]))


def _mac(secret: bytes, body: bytes) -> bytes:
    return hmac.digest(secret, b"beat\0" + body, "sha256")[:_MAC_BYTES]  # of no use as a proof or a seal


class Heart:
    """Sends beats to the coordinator, and hears its answers: `heard` is when the last one came (monotonic)."""

    def __init__(self, secret: bytes, name: str) -> None:
        self.secret, self.name = secret, name
        self.heard = time.monotonic()
        self._target: tuple[str, int] | None = None
        self._number = time.time_ns()  # grows across restarts of the agent, so that old beats stay old
        self._answered = self._number
        self._socket: socket.socket | None = None
        threading.Thread(target=self._live, name="heartbeat", daemon=True).start()

    def aim(self, host: str, port: int) -> None:
        """Where to send from now on."""
        self.heard = time.monotonic()
        self._target = (host, port)

    def _live(self) -> None:
        while True:
            target = self._target
            if target is None:
                time.sleep(INTERVAL_S)
                continue
            with contextlib.suppress(OSError):  # no way out just now: the next one may find it
                self._open(target)
                self._send(target)
                self._listen()

    def _open(self, target: tuple[str, int]) -> None:
        if self._socket is None:
            family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_DGRAM)

    def _send(self, target: tuple[str, int]) -> None:
        assert self._socket is not None
        self._number += 1
        try:
            self._socket.sendto(pack_beat(self.secret, Beat(self.name, self._number)), target)
        except OSError:
            time.sleep(INTERVAL_S)
            raise

    def _listen(self) -> None:
        """Until the next beat is due."""
        assert self._socket is not None
        due = time.monotonic() + INTERVAL_S
        while (left := due - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with contextlib.suppress(socket.timeout, OSError):
                beat = read_beat(self.secret, self._socket.recv(512))
                if beat is not None and not beat.sender and self._answered < beat.number <= self._number:
                    self._answered, self.heard = beat.number, time.monotonic()
