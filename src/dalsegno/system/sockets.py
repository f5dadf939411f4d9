"""Unix sockets: who is at the other end, and listening where only some may knock."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from pathlib import Path

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def peer_uid(sock: socket.socket) -> int:
    """Who is at the other end, as the kernel knows it."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def listen_at(path: Path, mode: int) -> socket.socket:
    """A listening socket with these rights from its first moment on; one that a dead process left is removed."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        sock.bind(str(path))
    finally:
        os.umask(before)
    sock.listen(1024)
    return sock
