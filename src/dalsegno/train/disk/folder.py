"""A run takes its folder: makes it, keeps other runs out, clears away what would be in its way. One rank does it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from dalsegno.train.disk.files import remove_tree, sync_folder, told
from dalsegno.train.disk.format import (
    ASIDE,
    LATEST,
    LOCK,
    MANIFEST,
    TemporaryName,
    is_of,
    is_trash,
    numbered,
    parse_step,
    parse_temporary,
    trash_name,
)
from dalsegno.train.disk.verify import faults_of, list_steps, read_manifest
from dalsegno.train.errors import CheckpointError

# ---- One folder, one run: a second one is refused, and told who the first is.


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
    except (ValueError, TypeError, RecursionError, OSError):
        return Holder()


# ---- A fresh start that loses nothing: the old checkpoints move into a folder of their own.


def set_aside(folder: Path, but_of: str = "") -> Path | None:
    """Where they are now; None if there were none. Foreign files stay where they are, and what that run has written."""
    with told("cannot set aside the checkpoints in", folder):
        old = [path for path in list_steps(folder) if not but_of or _is_of_another(path, but_of)]
        if not old:
            return None
        aside = _new_folder(folder)
        for path in old:
            os.rename(path, aside / path.name)
        if _pointed_at(folder) in {path.name for path in old}:
            os.rename(folder / LATEST, aside / LATEST)
        sync_folder(aside)
        sync_folder(folder)
        return aside


def _is_of_another(checkpoint: Path, run: str) -> bool:
    """One that does not say whose it is may be our own, damaged: it stays, for the loader to warn of."""
    try:
        return not is_of(read_manifest(checkpoint).run, run)
    except ValueError:
        return False


def _pointed_at(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(folder / LATEST)
    return ""


def _new_folder(folder: Path) -> Path:
    name = ASIDE + datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):  # the clock may stand still or go back
        path = folder / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return path
    raise FileExistsError(f"{folder / name}")


# ---- Readers and removal keep out of each other's way: who reads holds a shared lock on the manifest, who removes
# needs it alone. The locks are the system's (flock) and go with their process; a file system without them is taken
# as it is.


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


# ---- Which checkpoints go, and how they go: first out of sight in one stroke, then file by file.


class Retention(NamedTuple):
    last: int
    every: int | None = None  # steps that are multiples of this stay for ever


def to_remove(steps: Collection[int], newest: int, keep: Retention) -> list[int]:
    """Of the checkpoints up to the one just written. Later ones are of another history: not ours to judge."""
    ours = sorted(step for step in steps if step <= newest)
    old = ours[: -max(1, keep.last)]
    return [step for step in old if not (keep.every and step % keep.every == 0)]


def left_behind(names: Collection[str], ours: TemporaryName) -> list[str]:
    """Folders of savers that were killed, and removals that were cut short.

    Whoever writes here holds the lock, so what other runs left is dead; of our own run it is what is older.
    """
    found = {name: temporary for name in names if (temporary := parse_temporary(name))}
    dead = [name for name, each in found.items() if each.run != ours.run or _age(each) < _age(ours)]
    return sorted([*dead, *(name for name in names if is_trash(name))])


def namesakes(names: Collection[str], run: str, generation: int) -> list[str]:
    """What an earlier life of the run left under the names of this one: torchrun counts from 0 each time."""
    found = {name: temporary for name in names if (temporary := parse_temporary(name))}
    return sorted(name for name, each in found.items() if each.run == run and each.generation >= generation)


def remove_namesakes(folder: Path, run: str, generation: int) -> None:
    """Before the first save, by who holds the lock: or shares of two lives could be put together as one checkpoint."""
    with told("cannot clear", folder):
        for name in namesakes(os.listdir(folder), run, generation):
            remove_tree(folder / name)


def tidy(folder: Path, ours: TemporaryName, keep: Retention, warn: Callable[[str], None]) -> None:
    """After a commit. What cannot be removed now is tried again after the next one."""
    try:
        for name in left_behind(os.listdir(folder), ours):
            remove_tree(folder / name)
        _retain(folder, ours.step, keep)
    except OSError as error:
        warn(f"cannot remove old checkpoints in {folder}: {error.strerror}")


def _retain(folder: Path, newest: int, keep: Retention) -> None:
    whole = [path for path in list_steps(folder) if not faults_of(path, every_byte=False)]
    steps = {step: path for path in whole if (step := parse_step(path.name)) is not None}
    for step in to_remove(steps, newest, keep):
        if steps[step].name != _latest(folder):
            _remove(steps[step], step)


def _remove(checkpoint: Path, step: int) -> None:
    with removing(checkpoint) as alone:
        if alone:
            trash = checkpoint.with_name(trash_name(step, uuid.uuid4().hex[:8]))
            os.rename(checkpoint, trash)
            remove_tree(trash)


def _latest(folder: Path) -> str:
    try:
        return os.readlink(folder / LATEST)
    except OSError:
        return ""


def _age(temporary: TemporaryName) -> tuple[int, int]:
    return temporary.generation, temporary.step


# ---- A run takes its folder: makes it, keeps other runs out, clears away what would be in its way. One rank does
# it.


Warn = Callable[[str], None]


class Visitor(NamedTuple):
    """Who opens a folder. A run without a name cannot know what an earlier generation of it has written."""

    run: str
    named: bool
    generation: int  # from 1
    number: int  # of the checkpointer in its process, from 0
    fresh: bool

    @property
    def is_first(self) -> bool:
        """Nothing of this run can be on disk yet."""
        return self.generation <= 1 and self.number == 0


def open_folder(folder: Path, who: Visitor, warn: Warn) -> Path | None:
    """Where a fresh start has put what was there; None if there was nothing, or it stays."""
    with told("cannot make", folder):
        os.makedirs(folder, exist_ok=True)
    lock_folder(folder, who.run, warn)
    remove_namesakes(folder, numbered(who.run, who.number), who.generation)
    if not who.fresh:
        return None
    if who.is_first:
        return set_aside(folder)
    # Whoever came before may have died before it got here; but what this run has written it goes on from.
    return set_aside(folder, but_of=who.run) if who.named or who.generation <= 1 else None
