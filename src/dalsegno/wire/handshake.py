"""The handshake in which two sides prove that they know a secret, and the encryption of all later messages.

    server   {"nonce": S, ...}
    client   {"nonce": C, "proof": P, ...}      P covers both nonces and the names of the parties
    server   {"proof": Q}                       Q covers the same
    then both sides send sealed messages

A sealed message is encrypted and authenticated (encrypt, then MAC). Its keys come from the secret, both nonces, the
names and the direction, and the MAC covers the message number. A third party therefore cannot read, change, repeat,
reorder, omit or reflect a message, or use it in another connection. It can see only the length. There is no forward
secrecy: with the secret, recordings of all earlier connections can be decrypted.

Nodes may have only the standard library of Python 3.9, which has no cipher. The key stream is therefore SHAKE-256
over the key and the message number, and the MAC is HMAC-SHA-256.

`ClientHandshake` and `ServerHandshake` do no input or output: blocking, selector and asyncio code all use them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable

from dalsegno.wire.frames import MAX_BYTES, BadFrame, EncodedMessage, Message, encode, frame, parse

TAG_BYTES = 32
MAX_SEALED_BYTES = MAX_BYTES + TAG_BYTES
_NONCE = re.compile(r"[0-9a-f]{32}")


class BadProof(BadFrame):
    """The peer does not know the secret, or it meant to connect to another party."""


def nonce() -> str:
    return secrets.token_hex(16)


def read_nonce(message: Message) -> str:
    """Return the nonce from a handshake message; raise BadFrame if it is missing or invalid."""
    value = message.get("nonce")
    if not isinstance(value, str) or not _NONCE.fullmatch(value):
        raise BadFrame("`nonce` is missing or invalid")
    return value


def prove(secret: bytes, side: str, *transcript: str) -> str:
    """Return one side's proof. The transcript contains both nonces, so that no other connection accepts the proof."""
    return _digest(secret, side, *transcript).hex()


def holds(proof: object, secret: bytes, side: str, *transcript: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="replace"), prove(secret, side, *transcript).encode()
    )


class Seal:
    """Encrypts (`close`) or decrypts (`open`) the messages that one side of a connection sends.

    Each message is accepted once, in order. `transcript` is the data covered by the proofs of both sides: the nonces
    and the names.
    """

    def __init__(self, secret: bytes, side: str, *transcript: str) -> None:
        self._cipher = _digest(secret, "seal: encrypt", side, *transcript)
        self._mac = _digest(secret, "seal: authenticate", side, *transcript)
        self._count = 0

    def close(self, message: Message | EncodedMessage) -> bytes:
        """Return the sealed message as a frame; raise BadFrame, and change nothing, if it is too long."""
        text = encode(message)
        if len(text) > MAX_BYTES:
            raise BadFrame(f"a message of {len(text)} bytes is longer than {MAX_BYTES}")
        self._count += 1
        hidden = self._xor(text)
        return frame(self._tag(hidden) + hidden, MAX_SEALED_BYTES)

    def open(self, body: bytes) -> Message:
        """Return the message in a frame's body; raise BadFrame unless it is the next message that the peer sealed."""
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


class Session:
    """The transcript of an authenticated connection, and its seals for both directions.

    The transcript is the data covered by the proofs: the server's nonce, the client's nonce, and the names.
    """

    def __init__(self, secret: bytes, own_side: str, peer_side: str, transcript: tuple[str, ...]) -> None:
        self.secret, self.own_side, self.peer_side, self.transcript = secret, own_side, peer_side, transcript
        self.opener, self.closer = Seal(secret, peer_side, *transcript), Seal(secret, own_side, *transcript)


class ClientHandshake:
    """The client's side of the handshake. `own_side` and `peer_side` differ, so that no message can be reflected."""

    def __init__(self, own_side: str, peer_side: str) -> None:
        self._own_side, self._peer_side, self._nonce = own_side, peer_side, nonce()
        self.session: Session

    def answer(self, greeting: Message, secret: bytes, *names: str) -> Message:
        """Return the nonce and the proof for the server's greeting; raise BadFrame if the greeting is invalid."""
        transcript = (read_nonce(greeting), self._nonce, *names)
        self.session = Session(secret, self._own_side, self._peer_side, transcript)
        return {"nonce": self._nonce, "proof": prove(secret, self._own_side, *transcript)}

    def finish(self, welcome: Message) -> Session:
        """Return the session if the server's proof is valid; raise BadProof if not."""
        session = self.session
        if not holds(welcome.get("proof"), session.secret, session.peer_side, *session.transcript):
            raise BadProof("the server does not know the secret")
        return session


class ServerHandshake:
    """The server's side of the handshake."""

    def __init__(self, own_side: str, peer_side: str) -> None:
        self._own_side, self._peer_side, self._nonce = own_side, peer_side, nonce()

    def greeting(self) -> Message:
        return {"nonce": self._nonce}

    def check(self, hello: Message, secret: bytes, *names: str) -> Session:
        """Return the session if the client's proof is valid for these names; raise BadFrame or BadProof if not."""
        transcript = (self._nonce, read_nonce(hello), *names)
        if not holds(hello.get("proof"), secret, self._peer_side, *transcript):
            raise BadProof("the client does not know the secret, or wants to reach another party")
        return Session(secret, self._own_side, self._peer_side, transcript)

    def welcome(self, session: Session) -> Message:
        """Return the server's proof.

        Send it only after the client's proof was checked, so that an unauthenticated peer learns nothing.
        """
        return {"proof": prove(session.secret, self._own_side, *session.transcript)}


class Tags:
    """Authenticates the unencrypted bulk data that one side of a session sends.

    Each piece is accepted once, in order.
    """

    def __init__(self, session: Session, side: str) -> None:
        self._key, self._count = _digest(session.secret, "tag: authenticate", side, *session.transcript), 0

    def next(self) -> Callable[[memoryview], bytes]:
        """Return a function that computes the tag of the next piece. It may be called later, in any thread."""
        self._count += 1
        started = hmac.new(self._key, self._count.to_bytes(8, "big"), "sha256")

        def tag(piece: memoryview) -> bytes:
            started.update(piece)
            return started.digest()

        return tag


def _digest(secret: bytes, *parts: str) -> bytes:
    return hmac.digest(secret, "\0".join(parts).encode(errors="surrogatepass"), "sha256")
