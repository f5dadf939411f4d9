"""Memory that this process holds for nothing, given back to the system."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from dalsegno.system.apart import NoAnswer, ask

_DONTNEED = 4  # madvise(2): a page of a program's own is zeros when it is read next
_LOADED, _WRITABLE = 1, 2
# Of an ELF file of 64 bits: where its segments are told, in how many bytes each, and how many. Of a segment: its kind,
# flags, offset, address, physical address, bytes in the file, bytes in memory, alignment.
_HEAD, _SEGMENT = struct.Struct("<32xQ14xHH"), struct.Struct("<IIQQQQQQ")


def give_back_freed() -> None:
    """What was freed, and malloc keeps for later."""
    with contextlib.suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def give_back_cleared(library: str) -> int:
    """Pages of a loaded library's variables that hold nothing but zeros: they do so without memory, too. Returns how
    many bytes. Nobody else may call the library meanwhile."""
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
    """From where to where variables lie that begin as zeros (.bss), as the library's own head tells: in the kernel's
    list they may be one with their neighbours."""
    base = _base(library)
    if base is None or ctypes.string_at(base, 5) != b"\x7fELF\2":
        return
    at, size, count = _HEAD.unpack(ctypes.string_at(base, _HEAD.size))
    told = [_SEGMENT.unpack(ctypes.string_at(base + at + number * size, _SEGMENT.size)) for number in range(count)]
    loaded = [segment for segment in told if segment[0] == _LOADED]
    for _, flags, _, address, _, filed, held, _ in loaded:
        if flags & _WRITABLE:
            begin = base + address - loaded[0][3]
            yield begin + filed, begin + held


def _base(library: str) -> int | None:
    """Where it was loaded to."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and path[0].rpartition("/")[2].startswith(library) and int(offset, 16) == 0:
            return int(addresses.partition("-")[0], 16)
    return None


# ---- A module's compiled file, made by another process: compiling a large one leaves memory behind that stays
# taken.


TIMEOUT_S = 4.0


def compile_apart(module: str) -> None:
    """Before it is imported. Nothing is done where that has no use, or no right to."""
    if module in sys.modules:
        return
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return
    if os.access(os.path.dirname(spec.origin), os.W_OK):
        with contextlib.suppress(NoAnswer):
            ask([sys.executable, "-I", "-m", "py_compile", spec.origin], timeout_s=TIMEOUT_S)
