"""Files that are whole or not there: atomic writes, JSON, and a lock that dies with its holder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from dalsegno.errors import DalsegnoError

_ELSEWHERE = "set DALSEGNO_HOME to another folder, for images DALSEGNO_IMAGES"
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def write_atomic(path: Path, text: str, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write a file so that a reader, or a crash, finds the old text or the new one, never half.

    Not durable: only a crash of the machine may lose it, and the writer does not wait for the disk.
    """
    temp = _beside(path)
    try:
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(handle, "w") as file:
            os.fchmod(file.fileno(), mode)  # the umask must not decide who reads a secret, or who cannot read a table
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temp, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise explain(error, path) from error


@contextlib.contextmanager
def nameless(path: Path, mode: int | None = None) -> Iterator[int]:
    """An open file that gets its name when it is whole. Before that it has none: no kill leaves a part of it behind.

    `mode`: None as the umask has it.
    """
    handle, temp = _open_nameless(path)
    try:
        yield handle
        if mode is not None:
            os.fchmod(handle, mode)
        os.fsync(handle)
        if temp is None:
            temp = _beside(path)
            os.link(f"/proc/self/fd/{handle}", temp, src_dir_fd=handle)  # with it, Python follows the link
        os.replace(temp, path)
    except OSError as error:
        raise explain(error, path) from error
    finally:
        os.close(handle)
        if temp is not None:
            temp.unlink(missing_ok=True)


def _open_nameless(path: Path) -> tuple[int, Path | None]:
    try:
        return os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):  # file systems that have no such thing
            raise explain(error, path) from error
    temp = _beside(path)
    try:
        return os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temp
    except OSError as error:
        raise explain(error, path) from error


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:200]}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def write_in_place(path: Path, text: str, mode: int = 0o644) -> None:
    """Change a file that is mounted elsewhere: same file, new text; the end is cut off last, so it is never empty."""
    data = text.encode()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT, mode)
        try:
            os.fchmod(handle, mode)
            _write_all(handle, data)
            os.ftruncate(handle, len(data))
        finally:
            os.close(handle)
    except OSError as error:
        raise explain(error, path) from error


def _write_all(handle: int, data: bytes) -> None:
    written = 0
    while written < len(data):  # a nearly full disk takes a part, and refuses the rest
        written += os.pwrite(handle, data[written:], written)


def write_if_changed(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write only what differs; True if it was written."""
    if read_text(path) == text:
        return False
    write_atomic(path, text, mode)
    return True


def read_text(path: Path) -> str | None:
    """The file's text, or None if there is none."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(path: Path, hint: str = "") -> Json:
    """The file's value, or None if it is missing; a file of ours that does not parse is an error with this hint."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value: Json = json.loads(text)
        return value
    except ValueError as error:
        raise damaged(path, str(error), hint) from error


def damaged(path: Path, why: str, hint: str = "") -> DalsegnoError:
    """A file of ours that is not as we wrote it: a cluster's, unless the hint says otherwise."""
    return DalsegnoError(f"{path} is damaged: {why}", hint=hint or "`dalsegno down` removes the cluster it belongs to")


def explain(error: OSError, path: Path) -> DalsegnoError:
    """An operating system's error in words, with what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DalsegnoError(
            f"no space left to write {path}",
            hint="free some space, or name another disk: by DALSEGNO_HOME, for images by DALSEGNO_IMAGES or `-o`",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return DalsegnoError(f"may not write {path}", hint=f"use sudo, or {_ELSEWHERE}")
    if error.errno == errno.EROFS:
        return DalsegnoError(f"{path} is on a read-only file system", hint=_ELSEWHERE)
    return DalsegnoError(f"cannot write {path}: {error.strerror}", hint=f"look at that path, or {_ELSEWHERE}")


def owner_name(path: Path) -> str:
    """Whose it is; users of a cluster need not be known on the machine it is read from."""
    try:
        return path.owner()
    except KeyError:
        return f"uid {path.stat().st_uid}"


def make_folder(path: Path, mode: int = 0o755) -> None:
    """A folder of ours with just these rights; missing parents get them too, whatever the umask; there is fine."""
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
    except OSError as error:
        raise explain(error, path) from error


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; gone already is fine, and so is someone removing it at the same time."""
    for _ in range(5):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        _open_up(path)
        time.sleep(0.02)  # a daemon that was just killed may have written its last file
    shutil.rmtree(path)


def _open_up(path: Path) -> None:
    """Folders that even their owner may not enter or write to: an overlay's work folder, an unpacked image's."""
    for folder, names, _ in os.walk(path):
        for each in [os.path.join(folder, name) for name in names]:
            with contextlib.suppress(OSError):
                if not os.path.islink(each) and os.stat(each).st_mode & 0o700 != 0o700:
                    os.chmod(each, 0o700)


@contextlib.contextmanager
def locked(path: Path, who: str, *, shared: bool = False, wait_s: float = 0.1) -> Iterator[None]:
    """Hold a lock file, alone or with others that share it. A holder who stays is an error, a dead one does not
    matter, and one who only looked whether it is free is waited for."""
    import fcntl  # not on Windows, where nothing is locked

    make_folder(path.parent)
    # Whoever may open it could hold it. Root must not make a file where a link of another user leads.
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as file:
        until = time.monotonic() + wait_s
        while not _take(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX):
            if time.monotonic() >= until:
                raise DalsegnoError(
                    f"another `dalsegno` is working on {who}", hint="wait for it to end, then try again"
                )
            time.sleep(0.01)
        yield


def _take(file: IO[str], kind: int) -> bool:
    import fcntl

    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def in_turn(path: Path, on_wait: Callable[[], None] = lambda: None, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock file, after all who hold it now; `shared`: beside others who share it. It dies with its holder."""
    import fcntl

    make_folder(path.parent)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+") as file:
        if not _take(file, kind):
            on_wait()
            fcntl.flock(file, kind)
        yield
