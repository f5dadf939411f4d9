"""Who else can change a path: asked before anything in it is trusted, or written there by root."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.system.execute import caller
from dalsegno.system.files import explain, make_folder

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40  # as the kernel follows


def trusted_owners(env: Mapping[str, str] = os.environ) -> frozenset[int]:
    """Root, us, and the user who called us through sudo."""
    return frozenset({0, os.geteuid(), caller(env)})


def part_of_others(path: Path, owners: Collection[int]) -> str:
    """The first part of a path, links followed, that somebody else than these users can replace; "" if there is none.

    A part that does not exist ends the search: what the parts before it allow decides who can make it.
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
        step = todo.pop()  # `..` of a link: no part of what we came through is a link
        at = at.parent if step == ".." else at / step


def _is_open(about: os.stat_result) -> bool:
    """Whether others can replace what is in a folder; in one like /tmp nobody can replace what is another's."""
    group = bool(about.st_mode & stat.S_IWGRP) and about.st_gid != 0
    return (group or bool(about.st_mode & stat.S_IWOTH)) and not about.st_mode & stat.S_ISVTX


def make_own_folder(path: Path, hint: str) -> None:
    """Have a folder that belongs to us and that nobody else can write to; one that another user made is refused."""
    make_folder(path)
    try:
        handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise DalsegnoError(f"{path} is a symbolic link, and should be a folder of ours", hint=hint) from error
        raise explain(error, path) from error
    try:
        about = os.fstat(handle)
    finally:
        os.close(handle)
    if about.st_uid != os.geteuid():
        raise DalsegnoError(f"{path} belongs to another user (uid {about.st_uid})", hint=hint)
    if about.st_mode & _OTHERS_WRITE:
        raise DalsegnoError(f"others can write to {path}", hint=hint)


def folder_beneath(root: Path, inside: str) -> int:
    """Open a folder below another through no link at all: whoever owns what is between could swap a folder for a link
    while we look. OSError if there is one."""
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in Path(inside).parts:
        try:
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


def is_ours(path: Path, owners: Collection[int]) -> bool:
    """Whether this is a regular file of one of these users that nobody else can write to."""
    try:
        about = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(about.st_mode) and about.st_uid in owners and not about.st_mode & _OTHERS_WRITE
