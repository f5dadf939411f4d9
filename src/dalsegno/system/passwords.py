"""Create random passwords for web servers, and the bcrypt hashes that Prometheus' programs expect."""

from __future__ import annotations

import base64
import ctypes
import secrets

from dalsegno.errors import DalsegnoError

_LIBRARIES = ("libcrypt.so.1", "libcrypt.so.2")
_LEAST_COST = "04"  # the passwords are long and random, so a slower hash would not make them safer
_FROM = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_TO = b"./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def draw_password() -> str:
    """Return a new random password."""
    return secrets.token_urlsafe(32)


def bcrypt_hash(password: str) -> str:
    """Return the bcrypt hash of a password. It is computed by the C library, because Python has no bcrypt."""
    crypt = _library().crypt
    crypt.restype, crypt.argtypes = ctypes.c_char_p, (ctypes.c_char_p, ctypes.c_char_p)
    salt = base64.b64encode(secrets.token_bytes(16)).rstrip(b"=").translate(bytes.maketrans(_FROM, _TO))
    found: bytes | None = crypt(password.encode(), b"$2b$" + _LEAST_COST.encode() + b"$" + salt)
    if found is None or not found.startswith(b"$2b$"):
        raise DalsegnoError("libcrypt cannot compute bcrypt hashes", hint="install libxcrypt (Debian: libcrypt1)")
    return found.decode()


def _library() -> ctypes.CDLL:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DalsegnoError("libcrypt is missing", hint="install libxcrypt (Debian: libcrypt1)")
