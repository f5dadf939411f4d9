"""The files of a run in the user's shared-memory folder: names, access and removal.

    <run>.<rank>.<slot>        a snapshot of that rank
    <run>.<rank>.copy<slot>    a copy for a rank of another node
    <run>.<rank>.alive         locked while training without an agent runs
    <run>.safe                 the newest step that survives any single failure
    <run>.<rank>.flip          an injected fault: a bit of that rank's gradients is flipped

A run's id may contain dots, so names are parsed from their end. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.errors import CheckpointError, NotEnoughMemory

SHM = Path("/dev/shm")
_NAMES = 64  # number of names to try per user, in case other users have taken the first ones
# Limit on the files read per folder, because root reads all folders and a user must not keep root busy.
_MAX_FILES = 1 << 16
_FOLDER = re.compile(r"dalsegno\.[0-9]+(\.[0-9]+)?", re.ASCII)
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO of another user must not block this process


def find_folder(shm: Path = SHM, uid: int | None = None) -> Path | None:
    """Return the user's folder in shared memory; None if there is none."""
    uid = os.getuid() if uid is None else uid
    return next((path for path in _candidates(shm, uid) if _is_private(path, uid)), None)


def own_folder(shm: Path = SHM) -> Path:
    """Return this user's folder in shared memory. Create it if there is none, under a free name."""
    uid = os.getuid()
    found = find_folder(shm, uid)
    if found is not None:
        return found
    for path in _candidates(shm, uid):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if _is_private(path, uid):  # the folder was created here, or by another process of this user at the same time
            return path
    raise NotEnoughMemory(
        f"cannot create a folder for snapshots in {shm}: other users own dalsegno.{uid} and {_NAMES - 1} similar names",
        f"ask an administrator to remove {shm}/dalsegno.{uid}*",
    )


def list_user_folders(shm: Path = SHM) -> list[tuple[int, Path]]:
    """Return the snapshot folders of all users, each with its real owner. The uid in a folder's name may be wrong."""
    found = []
    for name in _listed(shm):
        if _FOLDER.fullmatch(name):
            with contextlib.suppress(OSError), _opened(shm / name) as fd:
                found.append((os.fstat(fd).st_uid, shm / name))
    return sorted(found)


def open_own(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Open a regular file of this user in a folder of this user; None if there is no such file."""
    with contextlib.suppress(OSError), _private(path.parent) as folder:
        fd = os.open(path.name, flags | _OPEN, dir_fd=folder)
        if _is_own_file(os.fstat(fd)):
            return fd
        os.close(fd)
    return None


def create_own(path: Path) -> int:
    """Create the file, and replace an existing file of that name.

    Create the folder again if another run has removed it.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.parent, 0o700)
        with contextlib.suppress(FileNotFoundError):  # a run that just ended has removed the empty folder
            return _create_in_private(path)


def _create_in_private(path: Path) -> int:
    with _private(path.parent) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        fd = os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
        os.fchmod(fd, 0o600)
        return fd


def list_folder(path: Path, uid: int) -> dict[str, float]:
    """Return the names in the user's folder and their last modification times (seconds since 1970)."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError), _opened(path) as folder:
        if os.fstat(folder).st_uid == uid:
            with os.scandir(folder) as entries:
                for entry in itertools.islice(entries, _MAX_FILES):
                    with contextlib.suppress(FileNotFoundError):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    return found


def remove_from(path: Path, names: list[str], uid: int) -> int:
    """Remove these files from the user's folder and return how many were removed.

    Root can safely call this, because no link is followed.
    """
    gone = 0
    with contextlib.suppress(OSError), _opened(path) as folder:
        if os.fstat(folder).st_uid == uid:
            for name in names:
                with contextlib.suppress(FileNotFoundError, PermissionError, IsADirectoryError):
                    os.unlink(name, dir_fd=folder)
                    gone += 1
    return gone


def remove_folder(path: Path) -> None:
    """Remove a folder of this user if it is empty."""
    if _FOLDER.fullmatch(path.name):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _candidates(shm: Path, uid: int) -> Iterator[Path]:
    yield shm / f"dalsegno.{uid}"
    for number in range(1, _NAMES):
        yield shm / f"dalsegno.{uid}.{number}"


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _private(folder: Path) -> Iterator[int]:
    """Open the folder. Raise unless only this user can access it."""
    with _opened(folder) as fd:
        if not _is_own(os.fstat(fd), os.getuid()):
            raise PermissionError(f"{folder} belongs to another user or is accessible to others")
        yield fd


def _is_private(folder: Path, uid: int) -> bool:
    with contextlib.suppress(OSError), _opened(folder) as fd:
        return _is_own(os.fstat(fd), uid)
    return False


def _is_own(found: os.stat_result, uid: int) -> bool:
    return found.st_uid == uid and not found.st_mode & 0o077


def _is_own_file(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and _is_own(found, os.getuid())


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, PermissionError):
        return []


# File names of snapshots

ALONE = "alone."  # prefix of the run id of training without a launcher
_RUN = re.compile(r"[A-Za-z0-9._@+=:-]{1,120}", re.ASCII)
_SLOT = re.compile(r"(.+)\.([0-9]+)\.(copy)?([0-9]+)", re.ASCII)
_ALIVE = re.compile(r"(.+)\.([0-9]+)\.alive", re.ASCII)
_SAFE = re.compile(r"(.+)\.safe(?:-new)?", re.ASCII)
_FLIP = re.compile(r"(.+)\.([0-9]+)\.flip", re.ASCII)


@dataclass(frozen=True, order=True)
class SlotName:
    """The name of a slot: its run, its rank, and whether it holds a copy for a rank on another node."""

    run: str
    rank: int
    slot: int
    copy: bool = False

    def __post_init__(self) -> None:
        check_run(self.run)

    def __str__(self) -> str:
        return f"{self.run}.{self.rank}.{'copy' if self.copy else ''}{self.slot}"


def check_run(run: str) -> None:
    """Refuse an id that could lead out of the folder, because it becomes part of a file name."""
    if not _RUN.fullmatch(run):
        raise CheckpointError(f"invalid run id {run!r}", "use letters, digits, dots and dashes")


def parse_slot(name: str) -> SlotName | None:
    """Parse the name of a slot; None for any other file."""
    found = _SLOT.fullmatch(name)
    if not found or not _RUN.fullmatch(found[1]):
        return None
    return SlotName(found[1], int(found[2]), int(found[4]), copy=bool(found[3]))


def safe_name(run: str) -> str:
    check_run(run)
    return f"{run}.safe"


def flip_name(run: str, rank: int) -> str:
    check_run(run)
    return f"{run}.{rank}.flip"


def alive_name(run: str, rank: int) -> str:
    check_run(run)
    return f"{run}.{rank}.alive"


def parse_alive(name: str) -> tuple[str, int] | None:
    """Return the run and rank in the name of an alive file; None for any other file."""
    found = _ALIVE.fullmatch(name)
    return (found[1], int(found[2])) if found and _RUN.fullmatch(found[1]) else None


def list_slots(run: str, folder: Path | None = None) -> list[SlotName]:
    """Return every slot of the run in this user's folder, including copies and empty slots."""
    found = (parse_slot(name) for name in _files_of(folder, os.getuid()))
    return sorted(slot for slot in found if slot and slot.run == run)


def sweep(run: str, folder: Path | None = None, uid: int | None = None) -> int:
    """Remove the run's files from the user's folder and return how many were removed."""
    uid = os.getuid() if uid is None else uid
    folder = folder or find_folder(uid=uid)
    return sweep_all({run}, folder, uid) if folder else 0


def sweep_all(runs: Collection[str], folder: Path, uid: int) -> int:
    """Remove the files of many runs in one pass and return their number."""
    gone = remove_from(folder, [name for name in _files_of(folder, uid) if run_of(name) in runs], uid)
    remove_folder(folder)  # always try, because a new file may have prevented an earlier removal
    return gone


def sweep_rank(run: str, rank: int, folder: Path | None = None) -> int:
    """Remove one rank's snapshots and alive file, and return how many files were removed.

    Other ranks' files and copies stay, because they may still be needed.
    """
    folder = folder or find_folder()
    if folder is None:
        return 0
    slots = [str(slot) for slot in list_slots(run, folder) if slot.rank == rank and not slot.copy]
    gone = remove_from(folder, [*slots, alive_name(run, rank)], os.getuid())
    remove_folder(folder)
    return gone


def find_forgotten_runs(before: float, folder: Path | None = None) -> list[str]:
    """Return this user's runs that have written no file since the time `before` (seconds since 1970)."""
    return sorted(run for run, at in last_written(folder, os.getuid()).items() if at < before)


def last_written(folder: Path | None, uid: int) -> dict[str, float]:
    """Return, for each run in the user's folder, when one of its files was last written (seconds since 1970)."""
    newest: dict[str, float] = {}
    for name, at in _files_of(folder, uid).items():
        run = run_of(name)
        if run is not None:
            newest[run] = max(newest.get(run, 0.0), at)
    return newest


def run_of(name: str) -> str | None:
    """Return the run to which a file of that name belongs; None for any other file."""
    found = _SLOT.fullmatch(name) or _ALIVE.fullmatch(name) or _SAFE.fullmatch(name) or _FLIP.fullmatch(name)
    return found[1] if found and _RUN.fullmatch(found[1]) else None


def _files_of(folder: Path | None, uid: int) -> dict[str, float]:
    folder = folder or find_folder(uid=uid)
    return list_folder(folder, uid) if folder else {}


# Snapshots of killed training processes without an agent. Nothing reads them again, so the next start removes them


def hold(run: str, rank: int, folder: Path | None = None) -> int:
    """Return the descriptor of a locked file.

    While this process or a child has the file open, the rank's snapshots are not removed.
    """
    path = (folder or own_folder()) / alive_name(run, rank)
    while True:
        try:
            fd = create_own(path)
        except FileExistsError:  # another process with the same run and rank has just created the file
            continue
        except PermissionError as error:
            raise NotEnoughMemory(str(error), "have its owner or an administrator remove it") from error
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
        os.close(fd)  # a sweep is removing this file, or has removed it before it was locked


def is_current(fd: int, run: str, rank: int, folder: Path | None = None) -> bool:
    """Return whether the held file still belongs to the rank.

    Training that restarted under the same name has a new file.
    """
    path = (folder or find_folder() or Path()) / alive_name(run, rank)
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def sweep_abandoned(folder: Path | None = None) -> list[tuple[str, int]]:
    """Remove the snapshots of this user's dead training processes that had no launcher. Return the runs and ranks."""
    folder = folder or find_folder()
    gone = []
    for name in list_folder(folder, os.getuid()) if folder else ():
        owner = parse_alive(name)
        if folder and owner and _sweep_if_dead(folder / name, *owner):
            gone.append(owner)
    return gone


def _sweep_if_dead(path: Path, run: str, rank: int) -> bool:
    """Remove the rank's files if its process has ended, and return whether they were removed.

    The alive file at `path` is locked during the removal. A process that starts under the same name creates a new alive
    file.
    """
    fd = open_own(path, os.O_RDWR)
    if fd is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        if os.fstat(fd).st_nlink:
            sweep_rank(run, rank, path.parent)
            return True
        return False
    finally:
        os.close(fd)
