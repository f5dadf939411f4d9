"""Files that are there in whole or not at all, after a power cut too; and errors of the disk in plain words."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

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
