"""Read files in a folder that another user may control: by descriptor, without links, regular files only.

The owner of a folder can replace its content while we read, leave a pipe without a writer, or link to a file that only
we may read. So nothing is opened by its full path, and the descriptor is checked: its type, and that it belongs to the
owner of the folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path, PurePath

from dalsegno.errors import DalsegnoError

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_MOST_NAMES = 1 << 16  # of one folder
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NotPlainFile(DalsegnoError):
    """A path that is not a regular file or folder of the owner of its folder."""


def open_beneath(root: Path, inside: str) -> int:
    """Open a regular file below a folder. Raises FileNotFoundError or, if it must not be read, NotPlainFile.

    The folder itself may be a link that belongs to its owner, to root or to us.
    """
    if not hasattr(os, "geteuid"):  # Windows: there are no other users' folders
        return os.open(root / inside, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    path = PurePath(inside)
    with _folder_beneath(root, path.parts[:-1]) as (folder, owner):
        handle = _open(path.name, _FILE, folder, root / inside)
        about = os.fstat(handle)
        if stat.S_ISREG(about.st_mode) and about.st_uid == owner:
            return handle
        os.close(handle)
        raise _refused(root / inside)


def read_beneath(root: Path, inside: str, most_bytes: int) -> bytes | None:
    """Return the content of a file below a folder; None if it does not exist. Raises NotPlainFile if it is longer."""
    try:
        handle = open_beneath(root, inside)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(handle, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise NotPlainFile(f"{root / inside} is longer than {most_bytes >> 20} MiB and is not read", hint="")
    return data


def list_beneath(root: Path, inside: str = ".") -> list[str]:
    """Return the names in a folder below another one, up to a limit; none if there is no such folder."""
    if not hasattr(os, "geteuid"):
        return os.listdir(root / inside) if (root / inside).is_dir() else []
    try:
        with _folder_beneath(root, PurePath(inside).parts) as (folder, _), os.scandir(folder) as found:
            return [entry.name for entry in itertools.islice(found, _MOST_NAMES)]
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _folder_beneath(root: Path, parts: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield an open folder below another one, and the owner of both."""
    link = os.lstat(root)
    followed = stat.S_ISLNK(link.st_mode)
    folder = _open(root, _FOLDER | (0 if followed else _NO_LINK), None, root)
    try:
        owner = os.fstat(folder).st_uid
        if followed and link.st_uid not in (owner, 0, os.geteuid()):
            raise _refused(root)
        for part in parts:
            below = _open(part, _FOLDER | _NO_LINK, folder, root.joinpath(*parts))
            os.close(folder)
            folder = below
            if os.fstat(folder).st_uid != owner:
                raise _refused(root.joinpath(*parts))
        yield folder, owner
    finally:
        os.close(folder)


def _open(name: str | Path, flags: int, folder: int | None, path: Path) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:  # a link, a socket, a device without a driver
        if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise
        raise _refused(path) from error


def _refused(path: Path) -> NotPlainFile:
    what = f"{path} is not read: it is not a regular file or folder of the owner of its folder"
    return NotPlainFile(what, hint="ask its owner to remove it: it is a link, a pipe, or another user's file")


@contextlib.contextmanager
def trusted_folder(path: Path, make: bool = False) -> Iterator[int]:
    """Open a folder that only we and root can have created. Raises OSError for any other.

    Each folder on the path is opened from its parent. It must belong to us or to root, and others must not be able to
    replace its entries: they may write to it only if the sticky bit is set, as on /tmp. The last folder must be ours,
    and nobody else may write to it. With `make`, missing folders are created.
    """
    owners, folder = (0, os.geteuid()), os.open("/", _FOLDER)
    try:
        parts = Path(os.path.realpath(path)).parts[1:]
        for number, part in enumerate(parts):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=folder)
            below = os.open(part, _FOLDER | _NO_LINK, dir_fd=folder)
            os.close(folder)
            folder, about = below, os.fstat(below)
            last = number == len(parts) - 1
            is_open = about.st_mode & _OTHERS_WRITE and (last or not about.st_mode & stat.S_ISVTX)
            if about.st_uid not in (owners[1:] if last else owners) or is_open:
                raise PermissionError(f"others can change {path}")
        yield folder
    finally:
        os.close(folder)
