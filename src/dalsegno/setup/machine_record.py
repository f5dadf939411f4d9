"""Code that the programs on a cluster's machines share: run commands, write files atomically, and record changes.

Like `applier.py`, this module uses only the standard library of Python 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import json
import os
import pwd
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

SETUP = "/var/lib/dalsegno/setup"
CODE = "/opt/dalsegno"
BEGIN, END = "# begin of Dal Segno", "# end of Dal Segno"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENV = {"PATH": PATH, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
Json = dict[str, Any]
Change = tuple[str, str, str]  # the kind, the name and the action


class Refused(Exception):
    """A request that cannot be carried out, with a hint."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


def emit(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


Call = Callable[..., tuple[int, str]]  # runs a command, as `run` does


def run(argv: list[str], timeout_s: float = 120.0) -> tuple[int, str]:
    """Run a command; return its exit code and its output, including stderr."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=ENV, timeout=timeout_s, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return 127, f"{argv[0]} is not installed"
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {timeout_s:.0f} s"
    return done.returncode, done.stdout.decode(errors="replace")


def tail(text: str, lines: int = 12) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-lines:])


def checked(argv: list[str], hint: str = "", timeout_s: float = 120.0, call: Call = run) -> str:
    code, output = call(argv, timeout_s)
    if code != 0:
        raise Refused(f"`{shlex.join(argv)}` ended with code {code}:\n{tail(output)}", hint)
    return output


def write(path: str, data: bytes, mode: int = 0o600, owner: tuple[int, int] = (0, 0)) -> None:
    """Write a file atomically, with its owner and mode."""
    handle, temp = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".dalsegno-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            if os.geteuid() == 0:
                os.fchown(file.fileno(), *owner)
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise


def read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_file(path: str) -> tuple[bytes, os.stat_result] | None:
    """Return the content and status of a regular file; None if `path` is missing or is anything else, such as a link.

    The folder may belong to a daemon's user, who can replace the file at any time.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            return None
        with open(handle, "rb", closefd=False) as file:
            return file.read(), found
    finally:
        os.close(handle)


MAX_LINKS = 40  # maximum number of links in a path, as in the kernel


def make_folder(path: str) -> int:
    """Create a folder and its missing parents, and return a descriptor of it.

    Every folder is opened relative to its parent. A link is followed only if nobody but root can have created it.
    Otherwise a daemon's user who owns one of the folders could make root change any other folder.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    folder, links = os.open("/", flags), 0
    todo = [part for part in reversed(path.split("/")) if part]
    try:
        while todo:
            part = todo.pop()
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=folder)
            if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
                about, links = os.fstat(folder), links + 1
                if about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022 or links > MAX_LINKS:
                    raise Refused(
                        f"a link leads to {path}, and users other than root can change it", "remove that link"
                    )
                target = os.readlink(part, dir_fd=folder)
                todo += [each for each in reversed(target.split("/")) if each]
                part = "/" if target.startswith("/") else "."
            below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        return folder
    except BaseException:
        os.close(folder)
        raise


def ids(item: Json) -> tuple[int, int]:
    """Return the uid and gid of an item's owner."""
    try:
        return pwd.getpwnam(item["owner"]).pw_uid, grp.getgrnam(item["group"]).gr_gid
    except KeyError as error:
        raise Refused(f"{item['path']} must belong to {item['owner']}:{item['group']}: {error.args[0]}") from None


class Record:
    """The record of all changes to the machine, in a file that is written before each change."""

    def __init__(self, root: str) -> None:
        self.folder = root.rstrip("/") + SETUP
        found = read(f"{self.folder}/record.json")
        self.data: Json = json.loads(found) if found else {}
        self.kept = json.dumps(self.data)

    def part(self, name: str) -> Json:
        part: Json = self.data.setdefault(name, {})
        return part

    def save(self) -> None:
        if json.dumps(self.data) == self.kept:
            return
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        write(f"{self.folder}/record.json", json.dumps(self.data, indent=1).encode())
        self.kept = json.dumps(self.data)

    def back_up(self, path: str, kind: str) -> None:
        """Record what exists at `path`, unless it is already recorded. If it is a file, keep a copy."""
        part = self.part(kind)
        if path in part:
            return
        entry: Json = {}
        if os.path.islink(path):
            entry = {"link": os.readlink(path)}
        elif (present := read_file(path)) is not None:
            data, found = present
            copy = os.path.join(self.folder, "backup", hashlib.sha256(path.encode()).hexdigest()[:16])
            os.makedirs(os.path.dirname(copy), mode=0o700, exist_ok=True)
            write(copy, data)
            entry = {"copy": copy, "mode": found.st_mode & 0o7777, "uid": found.st_uid, "gid": found.st_gid}
        elif os.path.lexists(path):
            raise Refused(f"{path} is not a file", "move it away, then run `dalsegno up` again")
        part[path] = entry
        self.save()

    def restore(self, path: str, kind: str) -> str:
        """Restore what was at `path` before our file.

        If somebody has edited our file, rename it and return its new path; otherwise return "".
        """
        entry, edited = self.part(kind)[path], ""
        present = read_file(path)
        if present is not None and entry.get("digest") not in (None, digest(present[0])):
            edited = f"{path}.dalsegno-saved"
            os.replace(path, edited)
        if "copy" in entry:
            if (kept := read(entry["copy"])) is None:
                hint = f"restore it by hand, delete its entry from {self.folder}/record.json, and try again"
                raise Refused(f"the backup of {path} is gone", hint)
            write(path, kept, entry["mode"], (entry["uid"], entry["gid"]))
        elif os.path.lexists(path):
            os.unlink(path)
        if "link" in entry:
            os.symlink(entry["link"], path)
        del self.part(kind)[path]
        self.save()
        return edited


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def split_block(text: str) -> tuple[str, str]:
    """Split a file into our block, without its markers, and the rest."""
    block: list[str] = []
    rest: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.startswith((BEGIN, END)):
            inside = line.startswith(BEGIN)
        else:
            (block if inside else rest).append(line)
    return "".join(block), "".join(rest)
