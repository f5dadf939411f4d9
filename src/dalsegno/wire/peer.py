"""Who is at the other end of a Unix socket. An abstract name is free for anyone to take once its owner has died."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


def uid_of(sock: socket.socket) -> int:
    """Return whose process is at the other end of a Unix socket; of a listener, who had it listen."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def check_peer(sock: socket.socket) -> None:
    """Raise unless a process of our own user answers: what it says decides which files are loaded."""
    if uid_of(sock) != os.getuid():
        raise PermissionError("another user's process answers in place of ours")
