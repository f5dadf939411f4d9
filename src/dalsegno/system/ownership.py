"""Check who else can change a path, before its content is trusted or root writes there."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.system.execute import caller
from dalsegno.system.files import explain, make_folder

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # the kernel's own limit


def trusted_owners(env: Mapping[str, str] = os.environ) -> frozenset[int]:
    """Return root, our uid, and the user who called us through sudo."""
    return frozenset({0, os.geteuid(), caller(env)})


def part_of_others(path: Path, owners: Collection[int]) -> str:
    """Return the first part of a path, following links, that other users can replace; "" if there is none.

    A part that does not exist ends the search: its parents decide who can create it.
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
            if links > _MOST_LINKS:
                return str(at)
            target = Path(os.readlink(at))
            todo += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path("/") if target.is_absolute() else at.parent
            continue
        if not todo:
            return ""
        step = todo.pop()  # `..` is safe: `at` contains no links
        at = at.parent if step == ".." else at / step


def _is_open(about: os.stat_result) -> bool:
    """Return whether others can replace entries of a folder. The sticky bit, as on /tmp, prevents it."""
    group = bool(about.st_mode & stat.S_IWGRP) and about.st_gid != 0
    return (group or bool(about.st_mode & stat.S_IWOTH)) and not about.st_mode & stat.S_ISVTX


def make_own_folder(path: Path, hint: str) -> None:
    """Create a folder that only we can write to. Refuse an existing one of another user."""
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
    """Open a folder below another without following links, which its owner could insert meanwhile.

    Raises OSError if there is a link.
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
    """Return whether this is a regular file of one of these users that nobody else can write to."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid in owners and not about.st_mode & _OTHERS_WRITE
