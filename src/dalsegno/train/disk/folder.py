"""Open a run's checkpoint folder on one rank (create it, lock it, remove leftovers), and apply retention."""

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

from dalsegno.train.disk.files import remove_tree, report_disk_errors, sync_folder
from dalsegno.train.disk.format import (
    ASIDE,
    LATEST,
    LOCK,
    MANIFEST,
    TemporaryName,
    checkpointer_name,
    is_of,
    is_trash,
    parse_step,
    parse_temporary,
    trash_name,
)
from dalsegno.train.disk.verify import faults_of, list_steps, read_manifest
from dalsegno.train.errors import CheckpointError

# Lock: one run per folder

_PAUSE_S = 0.05
_OTHER_RUN_WAIT_S = 0.5  # time for the lock's holder to exit, or to write its name into the lock file
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """The process that holds a folder's lock, as recorded in the lock file."""

    run: str = "an unknown run"
    host: str = "?"
    pid: int = 0
    since: str = "?"

    def __str__(self) -> str:
        return f"{self.run} (host {self.host}, process {self.pid}, since {self.since})"


@dataclass
class FolderLock:
    """A lock that this process can take several times. It is freed after as many releases, or when the process ends."""

    path: Path
    run: str
    fd: int
    pid: int
    count: int = 1

    def release(self) -> None:
        self.count -= 1
        if self.count == 0 and self.pid == os.getpid():
            _held_locks.pop(self.path, None)
            os.close(self.fd)


_held_locks: dict[Path, FolderLock] = {}


def lock_folder(folder: Path, run: str, warn: Callable[[str], None], wait_s: float = 10.0) -> FolderLock:
    """Lock the folder. If its file system has no locks, only warn.

    If another run holds the lock, raise CheckpointError after half a second. If an earlier process of the same run
    holds the lock, wait up to `wait_s`, because that process may be exiting. If it still holds the lock then, raise
    CheckpointError, or only warn if it is on another host.
    """
    path = folder.resolve() / LOCK
    held = _held_locks.get(path)
    if held and held.pid == os.getpid():
        return _take_again(held, folder, run)
    with report_disk_errors("cannot lock", folder):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _take(fd, folder, run, warn, wait_s)
    except BaseException:
        os.close(fd)
        raise
    _held_locks[path] = FolderLock(path, run, fd, os.getpid())
    return _held_locks[path]


def _take_again(held: FolderLock, folder: Path, run: str) -> FolderLock:
    if held.run != run:
        raise _refusal(folder, Holder(held.run, socket.gethostname(), held.pid))
    held.count += 1
    return held


def _take(fd: int, folder: Path, run: str, warn: Callable[[str], None], wait_s: float) -> None:
    started = time.monotonic()
    while not _try(fd, folder, warn):
        holder, waited = _read(fd), time.monotonic() - started
        if waited > (wait_s if holder.run == run else _OTHER_RUN_WAIT_S):
            _refuse_or_continue(folder, run, holder, warn)
            return
        time.sleep(_PAUSE_S)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    _write(fd, Holder(run, socket.gethostname(), os.getpid(), now))


def _refuse_or_continue(folder: Path, run: str, holder: Holder, warn: Callable[[str], None]) -> None:
    """Raise an error unless the holder is an earlier process of this run on another host.

    For such a process, only warn, because a file server keeps the locks of a lost host for minutes.
    """
    if holder.run != run or holder.host == socket.gethostname():
        raise _refusal(folder, holder)
    warn(f"{folder} is still locked by an earlier process of this run, {holder}; continuing without the lock")


def _refusal(folder: Path, holder: Holder) -> CheckpointError:
    return CheckpointError(f"{folder} is in use by {holder}", hint="use another folder, or end that run first")


def _try(fd: int, folder: Path, warn: Callable[[str], None]) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both errors if another process holds the lock
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warn(f"the file system of {folder} has no locks: a second run could write there")
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


def set_aside(folder: Path, except_run: str = "") -> Path | None:
    """Move all checkpoints into a new folder. With `except_run`, leave this run's and damaged checkpoints in place.

    Return the new folder; None if there was nothing to move.
    """
    return _set_aside_if(folder, lambda path: not except_run or _is_of_another(path, except_run))


def set_aside_untrusted(folder: Path, run: str, generation: int, step: int) -> Path | None:
    """Move aside the checkpoints that the run wrote after this step, in this generation or earlier.

    Return the new folder; None if there was nothing to move.
    """

    def is_untrusted(path: Path) -> bool:
        try:
            manifest = read_manifest(path)
        except ValueError:
            return False
        return is_of(manifest.run, run) and manifest.generation <= generation and manifest.step > step

    return _set_aside_if(folder, is_untrusted)


def _set_aside_if(folder: Path, is_old: Callable[[Path], bool]) -> Path | None:
    with report_disk_errors("cannot move the checkpoints aside in", folder):
        old = [path for path in list_steps(folder) if is_old(path)]
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
    """Return whether another run wrote the checkpoint. For a damaged one, return False; the loader warns about it."""
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
    for number in range(1, 1000):  # a folder of that name may exist if the clock went back
        path = folder / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return path
    raise FileExistsError(f"{folder / name}")


# Read locks. A reader holds a shared flock on the manifest, and a removal needs an exclusive one. On a file system
# without locks, readers and removals proceed without them.


class ReadLock:
    """A lock that prevents retention from removing the checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        """Take the lock; raise FileNotFoundError if the checkpoint was or is being removed."""
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
def lock_for_removal(checkpoint: Path) -> Iterator[bool]:
    """Yield True if no process reads the checkpoint. New readers then cannot lock it until the block ends."""
    fd = os.open(checkpoint / MANIFEST, os.O_RDWR | os.O_CLOEXEC)  # NFS can only lock files that are open for writing
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


# Retention. A checkpoint is first renamed, so that it disappears at once, then removed


class Retention(NamedTuple):
    last: int
    every: int | None = None  # steps that are multiples of this are never removed
    verified: int | None = None  # the newest step up to this one is kept, because the run may have to return to it


def choose_removals(steps: Collection[int], newest: int, keep: Retention) -> list[int]:
    """Return the steps to remove.

    `newest` is the step just written. Later steps come from an earlier attempt and are kept.
    """
    ours = sorted(step for step in steps if step <= newest)
    old = ours[: -max(1, keep.last)]
    trusted = max((step for step in ours if keep.verified is not None and step <= keep.verified), default=None)
    return [step for step in old if not (keep.every and step % keep.every == 0) and step != trusted]


def find_leftovers(names: Collection[str], ours: TemporaryName) -> list[str]:
    """Return the folders of killed savers and of interrupted removals.

    The caller holds the lock, so temporary folders of other runs and older ones of this run are stale.
    """
    found = {name: temporary for name in names if (temporary := parse_temporary(name))}
    dead = [name for name, each in found.items() if each.run != ours.run or _age(each) < _age(ours)]
    return sorted([*dead, *(name for name in names if is_trash(name))])


def find_namesakes(names: Collection[str], run: str, generation: int) -> list[str]:
    """Return the folders of an earlier start whose names this start will use again.

    Names repeat because torchrun counts restarts from 0 in each start.
    """
    found = {name: temporary for name in names if (temporary := parse_temporary(name))}
    return sorted(name for name, each in found.items() if each.run == run and each.generation >= generation)


def remove_namesakes(folder: Path, run: str, generation: int) -> None:
    """Remove an earlier start's folders that have the same names, so that shares of two starts are never merged.

    Call it before the first save, with the lock held.
    """
    with report_disk_errors("cannot clean up", folder):
        for name in find_namesakes(os.listdir(folder), run, generation):
            remove_tree(folder / name)


def tidy(folder: Path, ours: TemporaryName, keep: Retention, warn: Callable[[str], None]) -> None:
    """Remove leftovers and old checkpoints after a commit. Failed removals are retried after the next commit."""
    try:
        for name in find_leftovers(os.listdir(folder), ours):
            remove_tree(folder / name)
        _retain(folder, ours.step, keep)
    except OSError as error:
        warn(f"cannot remove old checkpoints in {folder}: {error.strerror}")


def _retain(folder: Path, newest: int, keep: Retention) -> None:
    whole = [path for path in list_steps(folder) if not faults_of(path, every_byte=False)]
    steps = {step: path for path in whole if (step := parse_step(path.name)) is not None}
    for step in choose_removals(steps, newest, keep):
        if steps[step].name != _latest(folder):
            _remove(steps[step], step)


def _remove(checkpoint: Path, step: int) -> None:
    with lock_for_removal(checkpoint) as alone:
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


# Opening a run's checkpoint folder

Warn = Callable[[str], None]


class OpeningRun(NamedTuple):
    """The run that opens a folder. Without a name, it cannot recognise the checkpoints of its earlier generations."""

    run: str
    named: bool
    generation: int  # counted from 1
    number: int  # index of this Checkpointer in its process, from 0
    fresh: bool

    @property
    def is_first(self) -> bool:
        """Return whether this is the run's first Checkpointer. If so, the folder has no checkpoints of this run yet."""
        return self.generation <= 1 and self.number == 0


def open_folder(folder: Path, who: OpeningRun, warn: Warn) -> Path | None:
    """Create and lock the folder, and remove the unfinished checkpoints of an earlier start.

    If a fresh start moved old checkpoints, return the folder where they are now; otherwise None.
    """
    with report_disk_errors("cannot create", folder):
        os.makedirs(folder, exist_ok=True)
    lock_folder(folder, who.run, warn)
    remove_namesakes(folder, checkpointer_name(who.run, who.number), who.generation)
    if not who.fresh:
        return None
    if who.is_first:
        return set_aside(folder)
    # An earlier generation may have saved checkpoints and died. The run resumes from these, so they stay.
    return set_aside(folder, except_run=who.run) if who.named or who.generation <= 1 else None
