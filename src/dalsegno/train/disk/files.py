"""Durable files that are complete or absent even after a power failure, and clear messages for disk errors."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from dalsegno.train.disk.format import FileMark
from dalsegno.train.errors import CheckpointError

_HINTS = {
    errno.ENOSPC: ("the disk is full", "free some space, or keep fewer checkpoints"),
    errno.EDQUOT: ("the quota is used up", "free some space, or keep fewer checkpoints"),
    errno.EROFS: ("the file system is read-only", "mount it writable, or choose another folder"),
    errno.EACCES: ("no permission", "let this user write there, or choose another folder"),
    errno.EPERM: ("no permission", "let this user write there, or choose another folder"),
    errno.ENOENT: ("the folder no longer exists", "check whether it was removed, or its file system unmounted"),
    errno.ENOTDIR: ("not a folder", "a file has that name: remove it, or choose another folder"),
    errno.EEXIST: ("not a folder", "a file has that name: remove it, or choose another folder"),
    errno.ESTALE: ("the folder no longer exists", "check whether it was removed on the file server"),
    errno.EIO: ("the disk reports an I/O error", "read the kernel log of this machine and of its file server"),
}
_BLOCK = 256 << 10  # write size in bytes; larger writes were three times slower in measurements


@contextlib.contextmanager
def report_disk_errors(doing: str, where: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the operation, the cause and the fix."""
    try:
        yield
    except OSError as error:
        cause, hint = _HINTS.get(error.errno or 0, (error.strerror or str(error), ""))
        raise CheckpointError(f"{doing} {error.filename or where}: {cause}", hint) from error


def write_durably(path: Path, data: bytes) -> None:
    """Create or replace a file atomically. The caller must sync the folder."""
    beside = path.with_name(f".{path.name}.new")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, memoryview(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(beside, path)


def write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:_BLOCK]) :]


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Network file systems that refuse fsync on folders do not need it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def link_durably(link: Path, target: str) -> None:
    """Create or replace a symbolic link atomically."""
    beside = link.with_name(f".{link.name}.new")
    unlink(beside)  # a killed process may have left this file
    os.symlink(target, beside)
    try:
        os.replace(beside, link)
    except OSError:
        unlink(beside)
        raise
    sync_folder(link.parent)


def unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def remove_tree(path: Path) -> None:
    """Remove a folder that we created, or what is left of it. Ignore errors, such as a missing folder."""
    shutil.rmtree(path, ignore_errors=True)


# A file with a checksum. One thread writes while others compute the checksum and sync, which shortens `finish`

# Smaller writes are collected up to this many bytes, because torch.save makes forty writes per tensor.
_GATHER = 1 << 20
_SLICE = 32 << 20  # bytes of a slice; its checksum is computed while it is written
_AHEAD = 128 << 20  # number of bytes after which an fsync of the written data starts


class ChecksummedFile:
    """A file for torch.save that returns its size and CRC-32 at the end.

    `write` never raises, because torch.save would replace the disk's error with its own. `check` raises the disk's
    error.
    """

    def __init__(self, path: Path) -> None:
        # The file is never group-writable, because files that other users can change are loaded with less trust.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._beside = ThreadPoolExecutor(2)
        self._syncing: Future[None] | None = None
        self._unsynced = 0
        self._gathered = bytearray()
        self._crc = 0
        self._error: OSError | None = None
        self.position = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self.position += view.nbytes
        if view.nbytes < _GATHER:
            self._gathered += view
        if len(self._gathered) >= _GATHER or view.nbytes >= _GATHER:
            self.flush()
        if view.nbytes >= _GATHER:
            for start in range(0, view.nbytes, _SLICE):
                self._put(view[start : start + _SLICE])
        return view.nbytes

    def flush(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        self._put(memoryview(gathered))

    def check(self) -> None:
        if self._error:
            raise self._error

    def finish(self) -> FileMark:
        """Sync the file to disk and return its size and checksum."""
        self.flush()
        self._settle()
        self.check()
        os.fsync(self._fd)
        return FileMark(self.position, self._crc)

    def _put(self, view: memoryview) -> None:
        if self._error:
            return
        summed = self._beside.submit(zlib.crc32, view, self._crc)  # crc32 and write release the GIL
        try:
            write_all(self._fd, view)
        except OSError as error:
            self._error = error
        self._crc = summed.result()  # wait, because the caller may reuse the memory after this call
        self._sync_ahead(view.nbytes)

    def _sync_ahead(self, written: int) -> None:
        self._unsynced += written
        if self._unsynced >= _AHEAD and (self._syncing is None or self._syncing.done()):
            self._settle()
            self._syncing, self._unsynced = self._beside.submit(os.fsync, self._fd), 0

    def _settle(self) -> None:
        """Wait for the running fsync and keep its error, because the kernel reports a failed write only once."""
        try:
            if self._syncing:
                self._syncing.result()
        except OSError as error:
            self._error = self._error or error

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._beside.shutdown()
        os.close(self._fd)
