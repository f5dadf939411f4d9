"""One folder, one run: a second one is refused, and told who the first is.

A POSIX record lock, because it belongs to the process alone: it goes when the process goes, however that ends, and
is not kept alive by children the process has forked (data loaders), as flock would be. The price: a process loses it
when it closes *any* descriptor of the file. So each process opens the file once, and counts its holders.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from dalsegno.train.disk.files import told
from dalsegno.train.disk.names import LOCK
from dalsegno.train.errors import CheckpointError

_PAUSE_S = 0.05
_STRANGER_S = 0.5  # enough for one that is just dying, or has not yet written its name
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """Who holds a folder, as the lock file says."""

    run: str = "an unknown run"
    host: str = "?"
    pid: int = 0
    since: str = "?"

    def __str__(self) -> str:
        return f"{self.run} (host {self.host}, process {self.pid}, since {self.since})"


@dataclass
class FolderLock:
    """Held until it is released as often as it was taken, or its process ends."""

    path: Path
    run: str
    fd: int
    pid: int
    count: int = 1

    def release(self) -> None:
        self.count -= 1
        if self.count == 0 and self.pid == os.getpid():
            _mine.pop(self.path, None)
            os.close(self.fd)


_mine: dict[Path, FolderLock] = {}


def lock_folder(folder: Path, run: str, warn: Callable[[str], None], wait_s: float = 10.0) -> FolderLock:
    """Waits a while for an earlier process of the same run, which may be dying still; others are refused at once."""
    path = folder.resolve() / LOCK
    mine = _mine.get(path)
    if mine and mine.pid == os.getpid():
        return _again(mine, folder, run)
    with told("cannot lock", folder):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _take(fd, folder, run, warn, wait_s)
    except BaseException:
        os.close(fd)
        raise
    _mine[path] = FolderLock(path, run, fd, os.getpid())
    return _mine[path]


def _again(mine: FolderLock, folder: Path, run: str) -> FolderLock:
    if mine.run != run:
        raise _refusal(folder, Holder(mine.run, socket.gethostname(), mine.pid))
    mine.count += 1
    return mine


def _take(fd: int, folder: Path, run: str, warn: Callable[[str], None], wait_s: float) -> None:
    started = time.monotonic()
    while not _try(fd, folder, warn):
        holder, waited = _read(fd), time.monotonic() - started
        if waited > (wait_s if holder.run == run else _STRANGER_S):
            _refuse_or_go_on(folder, run, holder, warn)
            return
        time.sleep(_PAUSE_S)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    _write(fd, Holder(run, socket.gethostname(), os.getpid(), now))


def _refuse_or_go_on(folder: Path, run: str, holder: Holder, warn: Callable[[str], None]) -> None:
    """A file server keeps the locks of a host that was lost for minutes; the same run need not wait for that."""
    if holder.run != run or holder.host == socket.gethostname():
        raise _refusal(folder, holder)
    warn(f"{folder} is still locked by an earlier process of this run, {holder}; going on without the lock")


def _refusal(folder: Path, holder: Holder) -> CheckpointError:
    return CheckpointError(
        f"{folder} is in use by {holder}", hint="give each run a folder of its own, or end that run first"
    )


def _try(fd: int, folder: Path, warn: Callable[[str], None]) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both answers for "held by another"
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warn(f"the file system of {folder} has no locks: nothing stops a second run from writing there")
    return True


def _write(fd: int, holder: Holder) -> None:
    text = json.dumps(asdict(holder)).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, text, 0)


def _read(fd: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(fd, 4096, 0)))
    except (ValueError, TypeError, OSError):
        return Holder()
