"""Check which user runs the peer of a Unix socket, because any user can bind an unused abstract name."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("iII")  # fields: pid, uid, gid


def uid_of(sock: socket.socket) -> int:
    """Return the user id of the peer process; for a server, that of the process that called `listen`."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def check_peer(sock: socket.socket) -> None:
    """Raise PermissionError unless the peer runs as our user, because its messages decide which files are loaded."""
    if uid_of(sock) != os.getuid():
        raise PermissionError("the peer process belongs to another user")
