"""The handshake and frames on a blocking socket. Reads stop at the end of a frame, because bulk data may follow."""

from __future__ import annotations

import socket
import time

from dalsegno.wire.frames import BadFrame, Message, parse, send
from dalsegno.wire.handshake import ClientHandshake, Session

HANDSHAKE_BYTES = 2 << 10  # maximum message length until the server has proved that it knows the secret
_LENGTH_BYTES = 4


def prove_as_client(
    sock: socket.socket, handshake: ClientHandshake, secret: bytes, *names: str, fields: Message, until: float
) -> Session:
    """Run the handshake; return the session once both sides are authenticated. `fields` identifies the client."""
    greeting = parse(read_frame(sock, HANDSHAKE_BYTES, until))
    send(sock, {**fields, **handshake.answer(greeting, secret, *names)})
    return handshake.finish(parse(read_frame(sock, HANDSHAKE_BYTES, until)))


def read_frame(sock: socket.socket, max_bytes: int, until: float | None = None) -> bytes:
    """Return the body of the next frame; raise BadFrame if it is longer than `max_bytes`."""
    length = int.from_bytes(read_exactly(sock, _LENGTH_BYTES, until), "big")
    if length > max_bytes:
        raise BadFrame(f"a message of {length} bytes is longer than {max_bytes}")
    return read_exactly(sock, length, until)


def read_exactly(sock: socket.socket, count: int, until: float | None = None) -> bytes:
    """Return `count` bytes. Raise TimeoutError at `until` (monotonic) and ConnectionError if the peer disconnects."""
    data = bytearray()
    while len(data) < count:
        if until is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the peer closed the connection")
        data += more
    return bytes(data)
