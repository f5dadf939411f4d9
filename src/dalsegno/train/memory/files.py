"""The names of a run's files in its user's folder in shared memory, and what a run left there.

    <run>.<rank>.<slot>        a snapshot of that rank
    <run>.<rank>.copy<slot>    the same, kept for a rank of another node
    <run>.<rank>.alive         locked as long as a training lives that has no agent (`alive`)
    <run>.safe                 the newest step that no single failure takes away

A run's id may hold dots: names are read from their end.
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

from dalsegno.train.errors import CheckpointError, NoRoom

# ---- Opening files in shared memory that only this user can have written. Costs no torch.


SHM = Path("/dev/shm")
_NAMES = 64  # for one user, should others have taken the first ones
_MOST_FILES = 1 << 16  # of one folder that are looked at: root looks too, and a user must not keep it busy
_FOLDER = re.compile(r"dalsegno\.[0-9]+(\.[0-9]+)?", re.ASCII)
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO of somebody else's must not make us wait


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
        if _is_private(path, uid):  # made here, or by another process of ours at the same time
            return path
    raise NoRoom(
        f"no folder for snapshots in {shm}: dalsegno.{uid} and {_NAMES - 1} names like it belong to other users",
        f"ask an administrator to remove {shm}/dalsegno.{uid}*",
    )


def every_folder(shm: Path = SHM) -> list[tuple[int, Path]]:
    """Return the snapshot folders of all users, each with its owner. The owner is the kernel's word, not the name's."""
    found = []
    for name in _listed(shm):
        if _FOLDER.fullmatch(name):
            with contextlib.suppress(OSError), _opened(shm / name) as fd:
                found.append((os.fstat(fd).st_uid, shm / name))
    return sorted(found)


def open_own(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """Open a regular file of this user's in a folder of this user's; None if there is none, or it is not ours."""
    with contextlib.suppress(OSError), _private(path.parent) as folder:
        fd = os.open(path.name, flags | _OPEN, dir_fd=folder)
        if _is_own_file(os.fstat(fd)):
            return fd
        os.close(fd)
    return None


def create_own(path: Path) -> int:
    """Create the file, in place of any file of that name. Create its folder again if another run has removed it."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path.parent, 0o700)
        with contextlib.suppress(FileNotFoundError):  # a run that ended removed the empty folder just now
            return _create_in_private(path)


def _create_in_private(path: Path) -> int:
    with _private(path.parent) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        fd = os.open(path.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
        os.fchmod(fd, 0o600)
        return fd


def list_folder(path: Path, uid: int) -> dict[str, float]:
    """Return the names in the user's folder and when each was written last (seconds since 1970)."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError), _opened(path) as folder:
        if os.fstat(folder).st_uid == uid:
            with os.scandir(folder) as entries:
                for entry in itertools.islice(entries, _MOST_FILES):
                    with contextlib.suppress(FileNotFoundError):
                        found[entry.name] = entry.stat(follow_symlinks=False).st_mtime
    return found


def remove_from(path: Path, names: list[str], uid: int) -> int:
    """Remove these from the user's folder, and return how many are gone. For root too: no link is followed."""
    gone = 0
    with contextlib.suppress(OSError), _opened(path) as folder:
        if os.fstat(folder).st_uid == uid:
            for name in names:
                with contextlib.suppress(FileNotFoundError, PermissionError, IsADirectoryError):
                    os.unlink(name, dir_fd=folder)
                    gone += 1
    return gone


def remove_folder(path: Path) -> None:
    """Remove a folder of ours if nothing is left in it."""
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
    """The folder, open. Raises unless nobody but this user can write in it."""
    with _opened(folder) as fd:
        if not _is_own(os.fstat(fd), os.getuid()):
            raise PermissionError(f"{folder} belongs to another user, or is open to others")
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


# ---- The names of a run's files in its user's folder in shared memory, and what a run left there.


ALONE = "alone."  # how the id of a training begins that no launcher knows of
_RUN = re.compile(r"[A-Za-z0-9._@+=:-]{1,120}", re.ASCII)
_SLOT = re.compile(r"(.+)\.([0-9]+)\.(copy)?([0-9]+)", re.ASCII)
_ALIVE = re.compile(r"(.+)\.([0-9]+)\.alive", re.ASCII)
_SAFE = re.compile(r"(.+)\.safe(?:-new)?", re.ASCII)


@dataclass(frozen=True, order=True)
class SlotName:
    """One slot's place: of which run and rank, and whether it is kept for a rank that runs elsewhere."""

    run: str
    rank: int
    slot: int
    copy: bool = False

    def __post_init__(self) -> None:
        check_run(self.run)

    def __str__(self) -> str:
        return f"{self.run}.{self.rank}.{'copy' if self.copy else ''}{self.slot}"


def check_run(run: str) -> None:
    """A name from outside becomes part of a file's name: nothing in it may lead out of the folder."""
    if not _RUN.fullmatch(run):
        raise CheckpointError(f"{run!r} cannot be a run's id", "letters, digits, dots and dashes")


def parse_slot(name: str) -> SlotName | None:
    """The slot of that file name; None if it is none of ours."""
    found = _SLOT.fullmatch(name)
    if not found or not _RUN.fullmatch(found[1]):
        return None
    return SlotName(found[1], int(found[2]), int(found[4]), copy=bool(found[3]))


def safe_name(run: str) -> str:
    check_run(run)
    return f"{run}.safe"


def alive_name(run: str, rank: int) -> str:
    check_run(run)
    return f"{run}.{rank}.alive"


def parse_alive(name: str) -> tuple[str, int] | None:
    """The run and rank of the file that tells whether they live; None if it is no such file."""
    found = _ALIVE.fullmatch(name)
    return (found[1], int(found[2])) if found and _RUN.fullmatch(found[1]) else None


def slots_of(run: str, folder: Path | None = None) -> list[SlotName]:
    """Every slot of the run in this user's folder, copies too, whatever it holds."""
    found = (parse_slot(name) for name in _files_of(folder, os.getuid()))
    return sorted(slot for slot in found if slot and slot.run == run)


def left_by(run: str, folder: Path | None = None, uid: int | None = None) -> list[str]:
    """The names of all files of the run in the user's folder."""
    return sorted(name for name in _files_of(folder, os.getuid() if uid is None else uid) if run_of(name) == run)


def sweep(run: str, folder: Path | None = None, uid: int | None = None) -> int:
    """Remove what the run left in the user's folder; how many files went. What is gone already is fine."""
    uid = os.getuid() if uid is None else uid
    folder = folder or find_folder(uid=uid)
    return sweep_all({run}, folder, uid) if folder else 0


def sweep_all(runs: Collection[str], folder: Path, uid: int) -> int:
    """The same for many runs, at the price of one."""
    gone = remove_from(folder, [name for name in _files_of(folder, uid) if run_of(name) in runs], uid)
    remove_folder(folder)  # also where another sweep took the last file and a new one was in the way of its rmdir
    return gone


def sweep_rank(run: str, rank: int, folder: Path | None = None) -> int:
    """Only what one rank left: others may still need theirs."""
    folder = folder or find_folder()
    if folder is None:
        return 0
    slots = [str(slot) for slot in slots_of(run, folder) if slot.rank == rank and not slot.copy]
    gone = remove_from(folder, [*slots, alive_name(run, rank)], os.getuid())
    remove_folder(folder)
    return gone


def forgotten(before: float, folder: Path | None = None) -> list[str]:
    """Runs of this user's of which no file was written since that time (seconds since 1970)."""
    return sorted(run for run, at in last_written(folder, os.getuid()).items() if at < before)


def last_written(folder: Path | None, uid: int) -> dict[str, float]:
    """Of every run in the user's folder: when one of its files was written last (seconds since 1970)."""
    newest: dict[str, float] = {}
    for name, at in _files_of(folder, uid).items():
        run = run_of(name)
        if run is not None:
            newest[run] = max(newest.get(run, 0.0), at)
    return newest


def run_of(name: str) -> str | None:
    """The run that a file of that name belongs to; None if it is none of ours."""
    found = _SLOT.fullmatch(name) or _ALIVE.fullmatch(name) or _SAFE.fullmatch(name)
    return found[1] if found and _RUN.fullmatch(found[1]) else None


def _files_of(folder: Path | None, uid: int) -> dict[str, float]:
    folder = folder or find_folder(uid=uid)
    return list_folder(folder, uid) if folder else {}


# ---- Whose snapshots nobody will ever read again: those of a training without an agent that was killed.


def hold(run: str, rank: int, folder: Path | None = None) -> int:
    """Return a locked file: while it is open here, or in a process that inherited it, the rank's snapshots stay."""
    path = (folder or own_folder()) / alive_name(run, rank)
    while True:
        try:
            fd = create_own(path)
        except FileExistsError:  # somebody sweeps, or a namesake starts
            continue
        except PermissionError as error:
            raise NoRoom(str(error), "find out who created it, and have it removed") from error
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
        os.close(fd)  # a sweep came between the file and its lock


def is_current(fd: int, run: str, rank: int, folder: Path | None = None) -> bool:
    """Whether the held file is still the rank's. A training that was restarted under the same name has its own."""
    path = (folder or find_folder() or Path()) / alive_name(run, rank)
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def sweep_abandoned(folder: Path | None = None) -> list[tuple[str, int]]:
    """Remove the snapshots of this user's trainings that are gone; whose they were. Runs of a launcher have no lock."""
    folder = folder or find_folder()
    gone = []
    for name in list_folder(folder, os.getuid()) if folder else ():
        whose = parse_alive(name)
        if folder and whose and _is_gone(folder / name, *whose):
            gone.append(whose)
    return gone


def _is_gone(path: Path, run: str, rank: int) -> bool:
    """Removes its files while the lock is held here: whoever starts under the same name takes a new file."""
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
