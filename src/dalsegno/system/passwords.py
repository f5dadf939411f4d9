"""Create random passwords for web servers, and the web configurations with which Prometheus' programs check them."""

from __future__ import annotations

import base64
import ctypes
import json
import secrets
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.system.files import write_atomic

_LIBRARIES = ("libcrypt.so.1", "libcrypt.so.2")
_LEAST_COST = "04"  # bcrypt's lowest cost; a higher cost adds no safety to long random passwords
_FROM = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_TO = b"./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


def draw_password() -> str:
    """Return a new random password."""
    return secrets.token_urlsafe(32)


def draw_web_login(user: str) -> tuple[str, str]:
    """Return a new password, and the web configuration with its hash (`--web.config.file`)."""
    password = draw_password()
    return password, json.dumps({"basic_auth_users": {user: bcrypt_hash(password)}}) + "\n"  # JSON is valid YAML


def make_web_login(user: str, password_file: Path, web_config: Path) -> None:
    """Write a password and its web configuration, unless both exist: a new hash would differ, even for the same
    password, and cause a restart."""
    if password_file.exists() and web_config.exists():
        return
    password, config = draw_web_login(user)
    write_atomic(password_file, password, 0o600)
    write_atomic(web_config, config, 0o600)


def main(arguments: list[str]) -> int:
    """Run `web-login USER PASSWORD-FILE WEB-CONFIG` and return the exit code."""
    user, password_file, web_config = arguments
    make_web_login(user, Path(password_file), Path(web_config))
    return 0


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
