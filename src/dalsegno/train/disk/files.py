"""Files that are there in whole or not at all, after a power cut too; and errors of the disk in plain words."""

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
    errno.ENOENT: ("the folder has vanished", "was it removed, or its file system unmounted?"),
    errno.ENOTDIR: ("it is no folder", "something that is no folder is in its place"),
    errno.EEXIST: ("it is no folder", "something that is no folder is in its place"),
    errno.ESTALE: ("the folder has vanished", "its file server has lost it; was it removed elsewhere?"),
    errno.EIO: ("the disk fails", "look at the kernel's log of this machine and of its file server"),
}
_BLOCK = 256 << 10  # bytes: writes of megabytes were measured three times slower


@contextlib.contextmanager
def told(doing: str, where: Path) -> Iterator[None]:
    """What the disk says, as a CheckpointError that names what was being done, the cause and the way out."""
    try:
        yield
    except OSError as error:
        cause, hint = _HINTS.get(error.errno or 0, (error.strerror or str(error), ""))
        raise CheckpointError(f"{doing} {error.filename or where}: {cause}", hint) from error


def write_durably(path: Path, data: bytes) -> None:
    """Either the old file or all of the new one, whatever happens. The folder's own fsync is the caller's."""
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
    """Makes the names in a folder last. Some network file systems know no fsync of folders, and need none."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def link_durably(link: Path, target: str) -> None:
    """Points a link elsewhere in one stroke."""
    beside = link.with_name(f".{link.name}.new")
    unlink(beside)  # of one who was killed here
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
    """Removes a folder of ours, or what is left of it; being there no more is fine."""
    shutil.rmtree(path, ignore_errors=True)


# ---- A new file, written once from start to end. While one thread writes, others compute the checksum and have the
# disk take what is there already, so that little is left to wait for at the end.


_GATHER = 1 << 20  # bytes: smaller writes are gathered, torch.save makes forty for each tensor
_SLICE = 32 << 20  # bytes that are written and summed side by side
_AHEAD = 128 << 20  # bytes after which the disk is asked to take them


class ChecksummedFile:
    """What torch.save needs of a file, and at the end a mark: size and CRC-32.

    Writing raises nothing: torch.save would answer with an error of its own and hide the disk's. `check` tells.
    """

    def __init__(self, path: Path) -> None:
        # Not for the group to write, whatever the umask: what others can have changed is loaded with less trust.
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
        """On the disk, not only on its way there."""
        self.flush()
        self._settle()
        self.check()
        os.fsync(self._fd)
        return FileMark(self.position, self._crc)

    def _put(self, view: memoryview) -> None:
        if self._error:
            return
        summed = self._beside.submit(zlib.crc32, view, self._crc)  # both let go of the interpreter's lock
        try:
            write_all(self._fd, view)
        except OSError as error:
            self._error = error
        self._crc = summed.result()  # nobody may look at the caller's memory after this
        self._sync_ahead(view.nbytes)

    def _sync_ahead(self, written: int) -> None:
        self._unsynced += written
        if self._unsynced >= _AHEAD and (self._syncing is None or self._syncing.done()):
            self._settle()
            self._syncing, self._unsynced = self._beside.submit(os.fsync, self._fd), 0

    def _settle(self) -> None:
        """The system tells of a failed write once, to whoever syncs first: that must not be lost."""
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
