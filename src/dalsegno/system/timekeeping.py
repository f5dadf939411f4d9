"""How well the kernel thinks its clock is kept: adjtimex(2), which any of NTP's daemons tells what it knows."""

from __future__ import annotations

import ctypes
import struct

# struct timex on 64-bit Linux: modes, offset, freq, maxerror, esterror, status, …; 208 bytes in all.
_HEAD = struct.Struct("@iqqqqi")
_SIZE = 256


def greatest_error_s() -> float:
    """By how much the clock may be off: 16 s or more where nobody keeps it. OSError if the kernel does not say."""
    room = ctypes.create_string_buffer(_SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(room) < 0:
        raise OSError(ctypes.get_errno(), "adjtimex")
    return float(_HEAD.unpack_from(room)[3]) / 1e6
