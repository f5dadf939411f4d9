"""Opening files in shared memory that only this user can have written. Costs no torch.

/dev/shm is a folder in which every user of the machine can make files. Snapshots are unpickled, so they lie in a folder
of mode 0700 that belongs to the user, and every file is checked again once it is open: owner, type and mode of the
descriptor, never of the name.

    /dev/shm/dalsegno.<uid>             or, while somebody else holds that name, dalsegno.<uid>.1, .2, …
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from dalsegno.train.errors import NoRoom

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
    """Create the file; whatever bears its name is removed. A folder that was swept meanwhile is made again."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path.parent, 0o700)
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
