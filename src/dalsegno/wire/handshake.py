"""Mutual proof that both sides know a secret without sending it, and sealed messages after that.

    server   {"nonce": S, ...}
    client   {"nonce": C, "proof": P, ...}      P covers both nonces and the client's name
    server   {"proof": Q}                       Q covers the same
    then both sides send sealed messages

A sealed message is encrypted and authenticated (encrypt, then MAC). Its keys come from the secret, both nonces, the
client's name and the direction, and its number is part of it: a message cannot be read, changed, repeated, reordered,
left out, sent back or used in another connection. Only its length shows. A secret that leaks later decrypts recordings
of earlier connections.

Nodes may have only the standard library of Python 3.9. It has no cipher, so the key stream is
SHAKE-256 over the key and the message's number, and the MAC is HMAC-SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable

from dalsegno.wire.frames import MAX_BYTES, BadFrame, Message, encode, frame, parse

TAG_BYTES = 32
MOST_SEALED = MAX_BYTES + TAG_BYTES
_NONCE = re.compile(r"[0-9a-f]{32}")


def nonce() -> str:
    return secrets.token_hex(16)


def read_nonce(message: Message) -> str:
    """Return the nonce in a message of the handshake; raise BadFrame if it is missing or invalid."""
    value = message.get("nonce")
    if not isinstance(value, str) or not _NONCE.fullmatch(value):
        raise BadFrame("`nonce` is missing or invalid")
    return value


def prove(secret: bytes, side: str, *said: str) -> str:
    """Return a proof for one side of one connection. It covers both nonces, so it is useless in another."""
    return _digest(secret, side, *said).hex()


def holds(proof: object, secret: bytes, side: str, *said: str) -> bool:
    """Return whether the proof is valid."""
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="replace"), prove(secret, side, *said).encode()
    )


class Seal:
    """Seals the messages of one side of a connection, or opens those of the other side, in order and each once.

    `said` is what both sides proved: the nonces and the client's name.
    """

    def __init__(self, secret: bytes, side: str, *said: str) -> None:
        self._cipher = _digest(secret, "seal: encrypt", side, *said)
        self._mac = _digest(secret, "seal: authenticate", side, *said)
        self._count = 0

    def close(self, message: Message) -> bytes:
        """Return a complete frame. Raise BadFrame, with no change of state, if the message is too long."""
        text = encode(message)
        if len(text) > MAX_BYTES:
            raise BadFrame(f"a message of {len(text)} bytes is longer than {MAX_BYTES}")
        self._count += 1
        hidden = self._xor(text)
        return frame(self._tag(hidden) + hidden, MOST_SEALED)

    def open(self, body: bytes) -> Message:
        """Return the message in a frame's body; raise BadFrame if the peer did not send it, or not as the next one."""
        self._count += 1
        tag, hidden = body[:TAG_BYTES], body[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(hidden)):
            raise BadFrame("a message with a wrong seal: forged or replayed")
        return parse(self._xor(hidden))

    def _xor(self, text: bytes) -> bytes:
        """Encrypt or decrypt the current message."""
        stream = hashlib.shake_256(self._cipher + self._count.to_bytes(8, "big")).digest(len(text))
        return (int.from_bytes(text, "little") ^ int.from_bytes(stream, "little")).to_bytes(len(text), "little")

    def _tag(self, hidden: bytes) -> bytes:
        return hmac.digest(self._mac, self._count.to_bytes(8, "big") + hidden, "sha256")


class Tags:
    """Tags for the bulk data of one side of one connection: authenticated, in order and each once, not encrypted."""

    def __init__(self, secret: bytes, side: str, *said: str) -> None:
        self._key, self._count = _digest(secret, "tag: authenticate", side, *said), 0

    def next(self) -> Callable[[memoryview], bytes]:
        """Return the function that makes the tag of the next piece. It may be called later, in any thread."""
        self._count += 1
        started = hmac.new(self._key, self._count.to_bytes(8, "big"), "sha256")

        def tag(piece: memoryview) -> bytes:
            started.update(piece)
            return started.digest()

        return tag


def _digest(secret: bytes, *parts: str) -> bytes:
    return hmac.digest(secret, "\0".join(parts).encode(errors="surrogatepass"), "sha256")
