"""Return unused memory of this process to the system."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from dalsegno.system.hanging_calls import NoAnswer, ask

_DONTNEED = 4  # madvise(2) advice; a private page then reads as zeros
_LOADED, _WRITABLE = 1, 2
# ELF header (64-bit): offset, entry size and number of program headers. Program header: type, flags, offset, address,
# physical address, size in the file, size in memory, alignment.
_HEAD, _SEGMENT = struct.Struct("<32xQ14xHH"), struct.Struct("<IIQQQQQQ")


def give_back_freed() -> None:
    """Give memory that this process has freed, but that malloc still keeps, back to the system."""
    with contextlib.suppress(AttributeError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def give_back_cleared(library: str) -> int:
    """Give the pages of a loaded library that contain only zeroed variables back to the system.

    Return the number of bytes. No other thread may call the library during this call.
    """
    page, given = os.sysconf("SC_PAGE_SIZE"), 0
    zeros, advise = bytes(page), _madvise()
    for begin, end in _cleared_at_start(library):
        for at in range(-(-begin // page) * page, end - page + 1, page):
            if ctypes.string_at(at, page) == zeros and advise(at, page, _DONTNEED) == 0:
                given += page
    return given


def _madvise() -> Callable[[int, int, int], int]:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


def _cleared_at_start(library: str) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of zero-initialized variables (.bss) from the library's ELF header.

    The kernel's memory map is not used, because it may merge these ranges with their neighbours.
    """
    base = _base(library)
    if base is None or ctypes.string_at(base, 5) != b"\x7fELF\2":
        return
    at, size, count = _HEAD.unpack(ctypes.string_at(base, _HEAD.size))
    segments = [_SEGMENT.unpack(ctypes.string_at(base + at + number * size, _SEGMENT.size)) for number in range(count)]
    loaded = [segment for segment in segments if segment[0] == _LOADED]
    for _, flags, _, address, _, filed, held, _ in loaded:
        if flags & _WRITABLE:
            begin = base + address - loaded[0][3]
            yield begin + filed, begin + held


def _base(library: str) -> int | None:
    """Return the address at which the library is loaded; None if it is not loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and path[0].rpartition("/")[2].startswith(library) and int(offset, 16) == 0:
            return int(addresses.partition("-")[0], 16)
    return None


TIMEOUT_S = 4.0


def compile_apart(module: str) -> None:
    """Compile a module's bytecode in another process before it is imported.

    Compiling a large module in this process would waste memory. Do nothing if the bytecode exists or cannot be written.
    """
    if module in sys.modules:
        return
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return
    if os.access(os.path.dirname(spec.origin), os.W_OK):
        with contextlib.suppress(NoAnswer):
            ask([sys.executable, "-I", "-m", "py_compile", spec.origin], timeout_s=TIMEOUT_S)
