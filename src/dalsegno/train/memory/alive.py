"""Whose snapshots nobody will ever read again: those of a training without an agent that was killed.

Such a training holds a lock on a file beside its snapshots. The kernel lets go of it when the last process of the
training is gone, however it ended, so there is no process id that could have been given to somebody else since.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from dalsegno.train.errors import NoRoom
from dalsegno.train.memory.names import alive_name, parse_alive, sweep_rank
from dalsegno.train.memory.owned import create_own, find_folder, list_folder, open_own, own_folder


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
