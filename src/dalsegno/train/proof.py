"""How agent and coordinator prove to each other that they know the run's secret, without saying it."""

from __future__ import annotations

import hashlib
import hmac
import secrets


def nonce() -> str:
    return secrets.token_hex(16)


def prove(secret: bytes, side: str, *said: str) -> str:
    """A proof for one side of one conversation: both nonces are in it, so it is of no use in another."""
    text = "\0".join((side, *said)).encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def holds(proof: object, secret: bytes, side: str, *said: str) -> bool:
    return isinstance(proof, str) and hmac.compare_digest(
        proof.encode(errors="replace"), prove(secret, side, *said).encode()
    )
