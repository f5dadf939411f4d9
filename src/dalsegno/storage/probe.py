"""Test one storage on one node, and print the result as JSON. This program runs as root or as a user.

    storage-probe '{"mount": "/fsx", "token": "…", "role": "writer", "user": "ann"}'

One node (`writer`) writes a file with the token. The others (`reader`) must find the same file: same content, same
inode number. All file operations use the user's rights, because a file server may deny root.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from dalsegno.system.hanging_calls import NoAnswer, ask, fork

PREFIX = ".dalsegno-check-"
BLOCK = b"\x5a\xa5" * (1 << 19)  # 1 MiB that is not all zeros
MAX_BYTES, MAX_S = 256 << 20, 3.0  # limits on the size and the time of each measurement
SHOWMOUNT_S = 5.0
MAX_FILES, FILES_S = 500, 2.0
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
FIND_S = 3.0  # how long to look for the token, because a network file system may show a new file late


class ProbeRole(Enum):
    """The task of a node: write the token, look for it, test the storage without a token, or remove the token."""

    WRITER = "writer"
    READER = "reader"
    ALONE = "alone"
    CLEANER = "cleaner"


@dataclass(frozen=True)
class ProbeOrder:
    """An order to a node. A user's test first tries the folder with the user's name below the mount point, then the
    mount point itself. Root's test tries only the mount point."""

    mount: str
    token: str
    role: ProbeRole
    user: str
    measure: bool = True
    export: str = ""  # `server:/folder` of NFS storage; if it is not mounted, ask the server about it

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "role": self.role.value})

    @classmethod
    def from_json(cls, text: str) -> ProbeOrder:
        value = json.loads(text)
        return cls(**{**value, "role": ProbeRole(value["role"])})


@dataclass(frozen=True)
class ProbeAnswer:
    """The result of an order on one node. `error` says why the node could not write; "" if it could."""

    fstype: str = ""  # type of the file system that the path is on; "" if the path does not exist
    source: str = ""
    mount_point: str = ""  # the mount point of that file system
    mounted: bool = False  # whether the mount point is the path itself
    not_exported: bool = False  # whether the NFS server of a missing or stale mount does not export the folder
    read_only: bool = False
    free_bytes: int = 0
    inode: int = 0  # the token's inode number; 0 if the token was not found
    token: bool = False  # whether the token's content was right
    error: str = ""
    mb_per_s: float = 0.0
    files_per_s: float = 0.0

    @classmethod
    def from_json(cls, text: str) -> ProbeAnswer:
        """Parse an answer leniently; raise ValueError if the text is not an answer."""
        try:
            value = json.loads(text)
        except RecursionError as error:
            raise ValueError("not an answer of the probe: nested too deeply") from error
        if not isinstance(value, dict):
            raise ValueError("not an answer of the probe")
        known = {name: type(default) for name, default in asdict(cls()).items()}
        try:
            return cls(**{name: kind(value[name]) for name, kind in known.items() if name in value})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"not an answer of the probe: {error}") from error


def find_mount(mountinfo: str, path: str) -> tuple[str, str, str, bool]:
    """Return the mount point, type, source and read-only flag of the mount that contains a path, from
    /proc/self/mountinfo.

    If several file systems are mounted on one mount point, only the last one is visible.
    """
    found = ("", "", "", False)
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        words, more = fields.split(), rest.split()
        if len(words) < 6 or len(more) < 3:
            continue
        point = _unescaped(words[4])
        holds = point == "/" or path == point or path.startswith(f"{point}/")
        if holds and len(point) >= len(found[0]):
            read_only = "ro" in (*words[5].split(","), *more[2].split(","))
            found = (point, more[0], _unescaped(more[1]), read_only)
    return found


def _unescaped(text: str) -> str:
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, letter)
    return text


def look(order: ProbeOrder) -> ProbeAnswer:
    """Carry out an order with the rights of this process."""
    if order.role is ProbeRole.CLEANER:
        _remove_token(order)
        return ProbeAnswer()
    path = os.path.realpath(order.mount)
    with open("/proc/self/mountinfo") as file:
        point, kind, source, read_only = find_mount(file.read(), path)
    try:
        about = os.statvfs(order.mount)
    except OSError as error:
        if is_stale(kind, error):
            return ProbeAnswer(kind, source, point, point == path, _is_not_exported(source), error="Stale file handle")
        return ProbeAnswer(error="the folder does not exist")
    if not os.path.isdir(order.mount):
        return ProbeAnswer(error="the folder does not exist")
    known: dict[str, Any] = {
        "fstype": kind, "source": source, "mount_point": point, "mounted": point == path,
        "free_bytes": about.f_bavail * about.f_frsize,
        "read_only": read_only or bool(about.f_flag & os.ST_RDONLY),
    }  # fmt: skip
    if order.export and point != path:
        known["not_exported"] = _is_not_exported(order.export)
    try:
        folder = _writable_folder(order)
        known |= _use(folder, order)
    except OSError as error:
        known |= _seen_token(order) | {"error": error.strerror or str(error)}
    return ProbeAnswer(**known)


def is_stale(kind: str, error: OSError) -> bool:
    """Return whether an NFS server no longer knows the mounted folder, for example after an export was removed.

    Only in this case is the server asked about a mounted folder. A mount that works is exported in any case, but a
    server with NFS 4 may list it under another path.
    """
    return kind.startswith("nfs") and error.errno == errno.ESTALE


def _is_not_exported(export: str) -> bool:
    """Return whether the server answers and does not list the folder. A server with only NFS 4 does not answer, so
    the result is False."""
    server, _, folder = export.partition(":")
    try:
        done = ask(("showmount", "--no-headers", "--exports", server), timeout_s=SHOWMOUNT_S)
    except NoAnswer:
        return False
    return done.exit_code == 0 and not lists_export(done.stdout, folder)


def lists_export(showmount: str, folder: str) -> bool:
    """Return whether the output of `showmount --no-headers --exports` lists a folder or one of its parents."""
    exported = [line.split()[0] for line in showmount.splitlines() if line.startswith("/")]
    return any(folder == path or path == "/" or folder.startswith(f"{path}/") for path in exported)


def _folders(order: ProbeOrder) -> list[str]:
    """Return the folders to try. For root, leave out the folder named after the user, because any user may replace it
    by a link."""
    return [order.mount] if os.geteuid() == 0 else [os.path.join(order.mount, order.user), order.mount]


def _writable_folder(order: ProbeOrder) -> str:
    """Return a folder in which a file can be created; raise OSError if there is none."""
    failure = OSError("no folder")
    for folder in _folders(order):
        name = os.path.join(folder, f"{PREFIX}{order.token}.{socket.gethostname()}.try")
        try:
            os.close(os.open(name, NEW_FILE, 0o600))
            os.unlink(name)
            return folder
        except OSError as error:
            failure = error
    raise failure


def _use(folder: str, order: ProbeOrder) -> dict[str, Any]:
    """Do what the order asks in a folder: write the token, look for it, and measure the speed."""
    found: dict[str, Any] = {}
    if order.role is ProbeRole.WRITER:
        with open(os.open(os.path.join(folder, PREFIX + order.token), NEW_FILE, 0o600), "w") as file:
            file.write(order.token)
            file.flush()
            os.fsync(file.fileno())
    if order.role is not ProbeRole.ALONE:
        found |= _seen_token(order)
    if order.measure:
        own = os.path.join(folder, f"{PREFIX}{order.token}.{socket.gethostname()}")
        found |= {"mb_per_s": write_speed(own), "files_per_s": file_rate(own)}
    return found


def _seen_token(order: ProbeOrder) -> dict[str, Any]:
    """Return the token's inode, and whether its content is right. A reader waits a few seconds until the token
    appears."""
    until = time.monotonic() + (FIND_S if order.role is ProbeRole.READER else 0.0)
    while True:
        for folder in _folders(order):
            with contextlib.suppress(OSError):
                path = os.path.join(folder, PREFIX + order.token)
                with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
                    return {"inode": os.fstat(file.fileno()).st_ino, "token": file.read(1000) == order.token}
        if time.monotonic() >= until:
            return {}
        time.sleep(0.1)


def _remove_token(order: ProbeOrder) -> None:
    for folder in _folders(order):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, PREFIX + order.token))


def write_speed(path: str, most: int = MAX_BYTES, seconds: float = MAX_S, *, keep: bool = False) -> float:
    """Return the speed of writing a file, in MB/s, including fsync. The file is removed unless `keep` is set."""
    written, handle = 0, os.open(path, NEW_FILE, 0o600)
    try:
        began = time.monotonic()
        while written < most and time.monotonic() - began < seconds:
            written += os.write(handle, BLOCK)
            if not written % (16 << 20):
                os.fsync(handle)  # regularly, so that the time limit also holds on a slow disk
        os.fsync(handle)
        return written / 1e6 / max(time.monotonic() - began, 1e-6)
    finally:
        os.close(handle)
        if not keep:
            os.unlink(path)


def file_rate(path: str) -> float:
    """Return how many files per second can be created and removed."""
    os.mkdir(path, 0o700)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    count, began = 0, time.monotonic()
    try:
        while count < MAX_FILES and time.monotonic() - began < FILES_S:
            os.close(os.open(str(count), NEW_FILE, 0o600, dir_fd=folder))
            os.unlink(str(count), dir_fd=folder)
            count += 1
        return count / max(time.monotonic() - began, 1e-6)
    finally:
        os.close(folder)
        os.rmdir(path)


def main(arguments: Sequence[str]) -> int:
    """Print the answer to the order in the arguments."""
    order = ProbeOrder.from_json(arguments[0])
    try:
        user = pwd.getpwnam(order.user)
        answer = look(order) if os.geteuid() == user.pw_uid else _look_as(user, order)
    except KeyError:
        answer = ProbeAnswer(fstype="?", error=f"user {order.user} is not known on this node")
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")
    return 0


def _look_as(user: pwd.struct_passwd, order: ProbeOrder) -> ProbeAnswer:
    """Carry out the order in a child process that has the user's rights instead of root's."""

    def run(sock: socket.socket) -> None:
        os.initgroups(user.pw_name, user.pw_gid)
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)
        sock.sendall(json.dumps(asdict(look(order))).encode())

    child, text = fork(run), b""
    child.sock.setblocking(True)
    while piece := child.sock.recv(1 << 16):
        text += piece
    child.wait(1.0)
    return ProbeAnswer.from_json(text.decode() or "null")
