"""munge, which signs for a user: what one process of theirs seals, only theirs can open, on any node of the cluster.

By its library, not its programs: a launcher must not start processes beside those it watches over.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_LIBRARY = "libmunge.so.2"
_SOCKETS = ("/run/munge/munge.socket.2", "/var/run/munge/munge.socket.2")
_SLURM_CONF = "/etc/slurm/slurm.conf"
_AUTH_SOCKET = re.compile(r"^\s*AuthInfo\s*=.*?socket=([^,\s]+)", re.IGNORECASE | re.MULTILINE)
_OPT_SOCKET, _OPT_UID_RESTRICTION = 8, 9  # munge.h


class NotSealed(OSError):
    """Nothing that munge vouches for as our own."""


@dataclass(frozen=True)
class Munge:
    """`socket` leads to the daemon."""

    socket: str

    def seal(self, data: bytes) -> str:
        """Each call gives another one, and each can be opened once on a node."""
        library, sealed = _load(), ctypes.c_char_p()
        context = self._context(library)
        try:
            library.munge_ctx_set(context, _OPT_UID_RESTRICTION, ctypes.c_uint32(os.getuid()))
            code = library.munge_encode(ctypes.byref(sealed), context, data, len(data))
            if code or sealed.value is None:
                raise NotSealed(_words(library, code))
            return sealed.value.decode()
        finally:
            library.munge_ctx_destroy(context)

    def unseal(self, sealed: str) -> bytes:
        library, data, size = _load(), ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        context = self._context(library)
        try:
            code = library.munge_decode(
                sealed.encode(), context, *(ctypes.byref(each) for each in (data, size, uid, gid))
            )
            if code:
                raise NotSealed(_words(library, code))
            if uid.value != os.getuid():
                raise NotSealed(f"it was made by the user with number {uid.value}")
            return ctypes.string_at(data.value or 0, size.value)
        finally:
            library.munge_ctx_destroy(context)

    def _context(self, library: ctypes.CDLL) -> ctypes.c_void_p:
        context = ctypes.c_void_p(library.munge_ctx_create())
        library.munge_ctx_set(context, _OPT_SOCKET, ctypes.c_char_p(self.socket.encode()))
        return context


def find_munge(environ: Mapping[str, str]) -> Munge | None:
    """The one that this node's Slurm uses, if it answers."""
    for path in (_slurm_socket(environ.get("SLURM_CONF") or _SLURM_CONF), *_SOCKETS):
        if path and os.path.exists(path) and _answers(Munge(path)):
            return Munge(path)
    return None


def _answers(munge: Munge) -> bool:
    try:
        return munge.seal(b"") != ""
    except (OSError, NotSealed):  # no library, or a socket without a daemon
        return False


def _slurm_socket(conf: str) -> str:
    try:
        with open(conf, errors="replace") as file:
            found = _AUTH_SOCKET.search(file.read())
    except OSError:
        return ""
    return found[1] if found else ""


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(_LIBRARY)
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_strerror.restype = ctypes.c_char_p
    return library


def _words(library: ctypes.CDLL, code: int) -> str:
    return bytes(library.munge_strerror(code) or b"").decode(errors="replace")
