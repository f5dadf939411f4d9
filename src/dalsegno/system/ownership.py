"""Functions for paths that other users may control: check who can change a path, and read files below it safely.

The owner of a folder can replace its content during a read, leave a pipe without a writer, or link to a file that only
this process may read. Therefore nothing in the folder is opened by its full path. Each opened file must have the
expected type and belong to the owner of the folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePath

from dalsegno.errors import DalsegnoError
from dalsegno.system.files import explain, make_folder

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40  # maximum number of links followed in one path, as in the kernel
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | _NO_LINK | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_MAX_NAMES = 1 << 16  # limit on the names read from one folder


def caller(env: Mapping[str, str] = os.environ) -> int:
    """Return the uid of the user who ran this command; under sudo, the user who called sudo."""
    uid, behind = os.geteuid(), env.get("SUDO_UID", "")
    return int(behind) if uid == 0 and behind.isdecimal() else uid


def trusted_owners(env: Mapping[str, str] = os.environ) -> frozenset[int]:
    """Return the uids of root, of this process, and of the user who called sudo."""
    return frozenset({0, os.geteuid(), caller(env)})


def part_of_others(path: Path, owners: Collection[int]) -> str:
    """Return the first part of a path, following links, that other users can replace; "" if there is none.

    The search ends at a part that does not exist, because the permissions of its parents determine who can create it.
    """
    todo, at, links = list(reversed(Path(os.path.abspath(path)).parts[1:])), Path("/"), 0
    while True:
        try:
            about = at.lstat()
        except OSError:
            return ""
        if about.st_uid not in owners or (stat.S_ISDIR(about.st_mode) and _is_open(about)):
            return str(at)
        if stat.S_ISLNK(about.st_mode):
            links += 1
            if links > _MAX_LINKS:
                return str(at)
            target = Path(os.readlink(at))
            todo += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path("/") if target.is_absolute() else at.parent
            continue
        if not todo:
            return ""
        step = todo.pop()  # `..` is safe, because `at` contains no links
        at = at.parent if step == ".." else at / step


def _is_open(about: os.stat_result) -> bool:
    """Return whether others can replace entries of a folder. The sticky bit, as on /tmp, prevents it."""
    group = bool(about.st_mode & stat.S_IWGRP) and about.st_gid != 0
    return (group or bool(about.st_mode & stat.S_IWOTH)) and not about.st_mode & stat.S_ISVTX


def make_own_folder(path: Path, hint: str) -> None:
    """Create a folder that only this user can write to. Raise DalsegnoError if others own it or can write to it."""
    make_folder(path)
    try:
        handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise DalsegnoError(f"{path} is a symbolic link, but must be a folder of ours", hint=hint) from error
        raise explain(error, path) from error
    try:
        about = os.fstat(handle)
    finally:
        os.close(handle)
    if about.st_uid != os.geteuid():
        raise DalsegnoError(f"{path} belongs to another user (uid {about.st_uid})", hint=hint)
    if about.st_mode & _OTHERS_WRITE:
        raise DalsegnoError(f"other users can write to {path}", hint=hint)


def folder_beneath(root: Path, inside: str) -> int:
    """Open a folder below another without following links. Raise OSError if there is a link.

    The owner could insert a link at any time.
    """
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in Path(inside).parts:
        try:
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


def is_ours(path: Path, owners: Collection[int]) -> bool:
    """Return whether the path is a regular file of one of these users that nobody else can write to."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid in owners and not about.st_mode & _OTHERS_WRITE


class NotPlainFile(DalsegnoError):
    """Raised for a path that must not be read: its type or its owner is wrong, or its content is too long."""


def open_beneath(root: Path, inside: str) -> int:
    """Open a regular file below a folder. Raise FileNotFoundError or, if it must not be read, NotPlainFile.

    The folder itself may be a link that belongs to its owner, to root or to this user.
    """
    if not hasattr(os, "geteuid"):  # Windows has no uids
        return os.open(root / inside, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    path = PurePath(inside)
    with _opened_folder(root, path.parts[:-1]) as (folder, owner):
        handle = _open(path.name, _FILE, folder, root / inside)
        about = os.fstat(handle)
        if stat.S_ISREG(about.st_mode) and about.st_uid == owner:
            return handle
        os.close(handle)
        raise _refused(root / inside)


def read_beneath(root: Path, inside: str, most_bytes: int) -> bytes | None:
    """Return the content of a file below a folder; None if it does not exist.

    Raise NotPlainFile if it is longer than `most_bytes`.
    """
    try:
        handle = open_beneath(root, inside)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with open(handle, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise NotPlainFile(f"{root / inside} is longer than {most_bytes >> 20} MiB and is not read", hint="")
    return data


def open_owned(path: Path, uid: int) -> int:
    """Open a regular file that the user `uid` owns. Raise OSError for anything else, even for a link to such a file.

    Links among the parents of the path are followed.
    """
    handle = os.open(path, _FILE)
    about = os.fstat(handle)
    if stat.S_ISREG(about.st_mode) and about.st_uid == uid:
        return handle
    os.close(handle)
    raise PermissionError(f"{path} is not a regular file of uid {uid}")


def list_beneath(root: Path, inside: str = ".") -> list[str]:
    """Return the names in a folder below another one, up to a limit; empty if the folder does not exist."""
    if not hasattr(os, "geteuid"):
        return os.listdir(root / inside) if (root / inside).is_dir() else []
    try:
        with _opened_folder(root, PurePath(inside).parts) as (folder, _), os.scandir(folder) as found:
            return [entry.name for entry in itertools.islice(found, _MAX_NAMES)]
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _opened_folder(root: Path, parts: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield the descriptor of a folder below another one, and the uid that owns both."""
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
    except OSError as error:  # for example a link, a socket, or a device without a driver
        if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise
        raise _refused(path) from error


def _refused(path: Path) -> NotPlainFile:
    what = f"{path} is not read: it is not a regular file or folder of the owner of its folder"
    return NotPlainFile(what, hint="ask its owner to remove it: it is a link, a pipe, or another user's file")


@contextlib.contextmanager
def trusted_folder(path: Path, make: bool = False) -> Iterator[int]:
    """Open a folder that only this user and root can have created. Raise OSError for any other.

    Each folder on the path is opened from its parent. It must belong to this user or to root, and others must not be
    able to replace its entries. Others may write to it only if the sticky bit is set, as on /tmp. The last folder must
    belong to this user, and nobody else may write to it. With `make`, missing folders are created.
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
