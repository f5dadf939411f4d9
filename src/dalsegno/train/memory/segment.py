"""Files in shared memory: made, mapped, and touched once."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import torch

from dalsegno.train.errors import NoRoom
from dalsegno.train.memory.owned import create_own, open_own

_PAGE = 4096
_AT_ONCE = 64 << 20  # a signal makes the kernel undo and begin anew what one call has allocated


def create(path: Path, size: int) -> int:
    """A new file of that size with all its memory: what is missing is an error now, not a SIGBUS later."""
    try:
        fd = create_own(path)
    except PermissionError as error:
        raise NoRoom(str(error), "find out who created it, and have it removed") from error
    try:
        _allocate(fd, size)
    except OSError as error:
        os.close(fd)
        path.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise
        raise NoRoom(f"{path.parent} is full: no room for {size} bytes", "a larger /dev/shm, or fewer slots") from error
    return fd


def adopt(path: Path) -> int | None:
    """The file as it is; None if there is none of ours."""
    return open_own(path, os.O_RDWR)


def map_to_write(fd: int) -> mmap.mmap:
    """All bytes of the file. Every page is touched here, so that no copy has to wait for page faults (10 x slower)."""
    mapping = mmap.mmap(fd, os.fstat(fd).st_size)
    torch.frombuffer(mapping, dtype=torch.uint8)[::_PAGE].sum()
    return mapping


def map_to_read(fd: int) -> mmap.mmap:
    """All bytes of the file; whoever changes them changes a copy of their own."""
    size = os.fstat(fd).st_size
    return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _allocate(fd: int, size: int) -> None:
    os.ftruncate(fd, size)
    for at in range(0, size, _AT_ONCE):
        os.posix_fallocate(fd, at, min(_AT_ONCE, size - at))
