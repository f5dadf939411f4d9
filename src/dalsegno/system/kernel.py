"""Facts that the kernel reports: its log, listening ports, and the maximum error of the clock."""

from __future__ import annotations

import ctypes
import os
import socket
import struct

RECORD_BYTES = 8192  # the kernel refuses a buffer that is smaller than the record
MAX_RECORDS = 20_000  # limit on records per read; the kernel's buffer holds fewer


class KernelLog:
    """An open /dev/kmsg. The first read returns the whole buffer, each later one only new records."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._path = path
        self._fd: int | None = None

    def new_records(self) -> list[str]:
        """Return lines `level,sequence,microseconds,flags;text`. Raise OSError if the log may not be read."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found: list[str] = []
        while len(found) < MAX_RECORDS:
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # the next record was overwritten, so continue with the oldest one
                continue
            if not record:
                break
            found.append(record.decode(errors="replace").split("\n", 1)[0])  # drop the key=value lines that follow
        return found

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


# Listening ports are read from the kernel, because a connection attempt would appear in the listener's log.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_HEAD = struct.Struct("=IHHII")  # fields: length, kind, flags, sequence, pid
_ASK = struct.Struct("=BBBxI48x")  # fields: family, protocol, extensions, states; then zeros, for any socket
_LISTEN_BIT, _LISTEN = 1 << 10, "0A"


def listening_ports() -> set[int]:
    """Return the ports with listeners.

    Netlink is used, because /proc/net/tcp lists all connections and reading it takes 10 ms.
    """
    return _ports(socket.AF_INET) | _ports(socket.AF_INET6)


def parse_listening(table: str) -> set[int]:
    """Return the ports with listeners in the text of /proc/net/tcp."""
    rows = [line.split() for line in table.splitlines()[1:] if line.strip()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN}


def _ports(family: int) -> set[int]:
    """Return the listening ports of one address family. Raise OSError if the kernel does not report them."""
    ask = _ASK.pack(family, socket.IPPROTO_TCP, 0, _LISTEN_BIT)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as sock:
        sock.settimeout(2.0)
        sock.send(_HEAD.pack(_HEAD.size + len(ask), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0) + ask)
        found: set[int] = set()
        while _take(sock.recv(1 << 16), found):
            pass
        return found


def _take(data: bytes, found: set[int]) -> bool:
    """Add the ports in one packet to `found`; return whether more packets follow."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, kind, *_ = _HEAD.unpack_from(data, at)
        if kind == _DONE:
            return False
        if kind == _ERROR or length < _HEAD.size:
            raise OSError("the kernel does not report listeners")
        found.add(int.from_bytes(data[at + _HEAD.size + 4 : at + _HEAD.size + 6], "big"))
        at += (length + 3) & ~3
    return True


# struct timex on 64-bit Linux: modes, offset, freq, maxerror, esterror, status, …; 208 bytes in all.
_TIMEX_HEAD = struct.Struct("@iqqqqi")
_SIZE = 256


def greatest_error_s() -> float:
    """Return the maximum clock error from adjtimex(2). NTP daemons update it; without a daemon it is 16 s or more.

    Raise OSError if the kernel does not report the error.
    """
    room = ctypes.create_string_buffer(_SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(room) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return float(_TIMEX_HEAD.unpack_from(room)[3]) / 1e6
