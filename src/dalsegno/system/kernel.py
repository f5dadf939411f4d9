"""The kernel's log, record by record, from where the last look ended."""

from __future__ import annotations

import ctypes
import os
import socket
import struct

RECORD_BYTES = 8192  # the kernel refuses a smaller room than its record
MOST = 20_000  # of one look: more than the kernel's buffer holds


class KernelLog:
    """/dev/kmsg held open: each look costs only what is new. Its first look is the whole buffer."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._path = path
        self._fd: int | None = None

    def new_records(self) -> list[str]:
        """Lines of the form `level,sequence,microseconds,flags;text`. OSError where the log may not be read."""
        if self._fd is None:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found: list[str] = []
        while len(found) < MOST:
            try:
                record = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # what was next has been overwritten: go on with the oldest there is
                continue
            if not record:
                break
            found.append(record.decode(errors="replace").split("\n", 1)[0])  # then come key=value lines
        return found

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


# ---- On which ports of this host somebody listens, as the kernel says: no call is made, and nobody's log
# complains.


_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_HEAD = struct.Struct("=IHHII")  # length, kind, flags, sequence, pid
_ASK = struct.Struct("=BBBxI48x")  # family, protocol, extensions; states; any socket
_LISTEN_BIT, _LISTEN = 1 << 10, "0A"


def listening_ports() -> set[int]:
    """Asked for listeners only: /proc/net/tcp goes through every connection of the machine, which takes 10 ms."""
    return _ports(socket.AF_INET) | _ports(socket.AF_INET6)


def parse_listening(table: str) -> set[int]:
    """The same from the text of /proc/net/tcp."""
    rows = [line.split() for line in table.splitlines()[1:] if line.strip()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTEN}


def _ports(family: int) -> set[int]:
    """OSError where the kernel does not tell."""
    ask = _ASK.pack(family, socket.IPPROTO_TCP, 0, _LISTEN_BIT)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as sock:
        sock.settimeout(2.0)
        sock.send(_HEAD.pack(_HEAD.size + len(ask), _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, 1, 0) + ask)
        found: set[int] = set()
        while _take(sock.recv(1 << 16), found):
            pass
        return found


def _take(data: bytes, found: set[int]) -> bool:
    """Add the ports in one packet; whether more will come."""
    at = 0
    while at + _HEAD.size <= len(data):
        length, kind, *_ = _HEAD.unpack_from(data, at)
        if kind == _DONE:
            return False
        if kind == _ERROR or length < _HEAD.size:
            raise OSError("the kernel does not tell who listens")
        found.add(int.from_bytes(data[at + _HEAD.size + 4 : at + _HEAD.size + 6], "big"))
        at += (length + 3) & ~3
    return True


# ---- How well the kernel thinks its clock is kept: adjtimex(2), which any of NTP's daemons tells what it knows.


# struct timex on 64-bit Linux: modes, offset, freq, maxerror, esterror, status, …; 208 bytes in all.
_TIMEX_HEAD = struct.Struct("@iqqqqi")
_SIZE = 256


def greatest_error_s() -> float:
    """By how much the clock may be off: 16 s or more where nobody keeps it. OSError if the kernel does not say."""
    room = ctypes.create_string_buffer(_SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(room) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return float(_TIMEX_HEAD.unpack_from(room)[3]) / 1e6
