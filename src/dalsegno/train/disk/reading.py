"""Readers and removal keep out of each other's way: who reads holds a shared lock on the manifest, who removes needs
it alone. The locks are the system's (flock) and go with their process; a file system without them is taken as it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dalsegno.train.disk.names import MANIFEST

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class ReadLock:
    """While it is held, retention leaves the checkpoint alone."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises FileNotFoundError if the checkpoint is gone, or just going."""
        path = checkpoint / MANIFEST
        self._fd: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not _lock(self._fd, fcntl.LOCK_SH) or not os.path.samestat(os.fstat(self._fd), os.stat(path)):
                raise FileNotFoundError(errno.ENOENT, "is being removed", str(path))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def removing(checkpoint: Path) -> Iterator[bool]:
    """True if nobody reads the checkpoint; no new reader can begin meanwhile."""
    fd = os.open(checkpoint / MANIFEST, os.O_RDWR | os.O_CLOEXEC)  # NFS wants it open for writing
    try:
        yield _lock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True
