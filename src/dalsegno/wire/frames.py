"""Messages on a socket: a length, then JSON. On a Unix socket, messages can also carry open files."""

from __future__ import annotations

import array
import json
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Message = dict[str, Any]

MAX_BYTES = 1 << 20  # maximum message length; a peer that announces a longer message is disconnected
MAX_DEPTH = 64  # maximum levels of nested arrays and objects; valid messages have fewer than ten
_LENGTH = struct.Struct("!I")
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would create one for each message
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass(frozen=True)
class EncodedMessage:
    """A message that its sender has already encoded, so that parts shared by many messages are encoded only once."""

    first_key: str
    text: bytes


class BadFrame(Exception):
    """The peer violated the protocol."""


def pack(message: Message | EncodedMessage) -> bytes:
    return frame(encode(message))


def encode(message: Message | EncodedMessage) -> bytes:
    return message.text if isinstance(message, EncodedMessage) else to_json(message).encode()


def to_json(value: object) -> str:
    return _ENCODER.encode(value)


def frame(body: bytes, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the body preceded by its length; raise BadFrame if it is too long."""
    if len(body) > max_bytes:
        raise BadFrame(f"a message of {len(body)} bytes is longer than {max_bytes}")
    return _LENGTH.pack(len(body)) + body


class Reader:
    """Parses a byte stream that arrives in pieces of any size into messages of at most `max_bytes`.

    The parsing time is linear in the number of bytes even for small pieces, because a `bytearray` drops its front
    without a copy.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        for body in self.bodies(data):
            yield parse(body)

    def bodies(self, data: bytes) -> Iterator[bytes]:
        """Add bytes, then yield the body of each complete frame.

        Frames that the caller does not consume stay for the next call.
        """
        self.add(data)
        while (body := self.take()) is not None:
            yield body

    def add(self, data: bytes) -> None:
        self._buffer += data

    @property
    def is_empty(self) -> bool:
        return not self._buffer

    def take(self) -> bytes | None:
        """Return the body of the next frame; None if the frame is incomplete."""
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.max_bytes:
            raise BadFrame(f"a message of {length} bytes is longer than {self.max_bytes}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body


def parse(body: bytes) -> Message:
    """Return the JSON object in a frame's body; raise BadFrame if the body is anything else.

    Deep nesting is rejected before json recurses into it. Otherwise garbage collection could run near the recursion
    limit, where the finalizers of unrelated objects fail with RecursionError.
    """
    if _depth(body) > MAX_DEPTH:
        raise BadFrame(f"more than {MAX_DEPTH} levels of nesting")
    try:
        message = json.loads(body.decode())  # given bytes, json would also accept UTF-16, which `_depth` cannot read
    except ValueError as error:
        raise BadFrame(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise BadFrame("not a JSON object")
    return message


def _depth(body: bytes) -> int:
    """Return an upper bound on the nesting depth of a JSON text, in linear time."""
    count = body.count(b"[") + body.count(b"{")
    if count <= MAX_DEPTH:
        return count
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    return max(accumulate(map(_STEP.__getitem__, outside_strings.translate(None, _NO_BRACKETS))), default=0)


def send(sock: socket.socket, message: Message, files: Sequence[int] = ()) -> None:
    """Send a complete message. The file descriptors in `files` are attached to its first byte."""
    data = pack(message)
    if not files:
        sock.sendall(data)
        return
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
    sent = sock.sendmsg([data], [rights])
    sock.sendall(data[sent:])


class FileReader(Reader):
    """Reads messages and file descriptors from a Unix socket. `take_files` returns the descriptors."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[int] = []

    def receive(self, sock: socket.socket, wait: bool = True) -> list[Message] | None:
        """Return the messages that have arrived; None if the peer has closed the connection."""
        room = socket.CMSG_LEN(64 * array.array("i").itemsize)
        try:
            data, extra, _, _ = sock.recvmsg(65536, room, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        for level, kind, payload in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fresh = array.array("i")
                fresh.frombytes(payload[: len(payload) - len(payload) % fresh.itemsize])
                self._files.extend(fresh)
        return list(self.feed(data)) if data else None

    def take_files(self, count: int) -> list[int]:
        taken, self._files = self._files[:count], self._files[count:]
        return taken
