"""Files: atomic writes, JSON, removal of trees, and locks that are released when their holder ends."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from dalsegno.errors import DalsegnoError

_ELSEWHERE = "set DALSEGNO_HOME to another folder, for images DALSEGNO_IMAGES"
_OTHER_DISK = "use another disk: set DALSEGNO_HOME, or for images DALSEGNO_IMAGES or `-o`"
# These flags do not exist on Windows, where they are not needed.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FOLDER = os.O_RDONLY | _NO_LINK | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_MAX_DEPTH = 100  # number of levels removed at a time, because each level needs a descriptor
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def write_atomic(path: Path, text: str, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write a file atomically. Even after a crash, a reader finds the old text or the new text, never a part of it.

    Without `durable`, a crash of the machine may lose the new text, but the writer does not wait for the disk.
    """
    temp = _beside(path)
    try:
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, mode)
        with os.fdopen(handle, "w") as file:
            # Set explicitly, because the umask could expose a secret or make a public file unreadable.
            if hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temp, path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise explain(error, path) from error


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a crash of the machine. The fsync of a file does not cover its name.

    Some network file systems do not support fsync of folders, and do not need it. Windows cannot open a folder.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise
    finally:
        os.close(handle)


@contextlib.contextmanager
def nameless(path: Path, *, own: bool = False) -> Iterator[int]:
    """Yield an open file without a name, and give it its name when it is complete.

    A killed process therefore leaves no partial file, except on a file system without O_TMPFILE, where the open file
    has a temporary name. With `own`, no other user may write to the file, whatever the umask is. Without `own`, the
    user has named the path with `-o`.
    """
    handle, temp = _open_nameless(path, named=not own)
    try:
        yield handle
        if own:
            os.fchmod(handle, stat.S_IMODE(os.fstat(handle).st_mode) & ~0o022)
        os.fsync(handle)
        if temp is None:
            temp = _beside(path)
            os.link(f"/proc/self/fd/{handle}", temp, src_dir_fd=handle)  # src_dir_fd makes Python follow the link
        os.replace(temp, path)
        sync_folder(path.parent)
    except OSError as error:
        raise explain(error, path, named=not own) from error
    finally:
        os.close(handle)
        if temp is not None:
            temp.unlink(missing_ok=True)


def check_creatable(path: Path) -> None:
    """Raise if no file can be created at this path, which the user has named with `-o`."""
    handle, temp = _open_nameless(path, named=True)
    os.close(handle)
    if temp is not None:
        temp.unlink(missing_ok=True)


def _open_nameless(path: Path, *, named: bool) -> tuple[int, Path | None]:
    try:
        return os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), None
    except OSError as error:
        # These errors mean that the file system has no O_TMPFILE.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise explain(error, path, named=named) from error
    temp = _beside(path)
    try:
        return os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temp
    except OSError as error:
        raise explain(error, path, named=named) from error


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name[:200]}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def write_if_changed(path: Path, text: str, mode: int = 0o644) -> bool:
    """Write a file if its text differs; return whether it was written."""
    if read_text(path) == text:
        return False
    write_atomic(path, text, mode)
    return True


def read_text(path: Path) -> str | None:
    """Return the file's text; None if it does not exist."""
    try:
        return path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_json(path: Path, hint: str = "") -> Json:
    """Return the file's JSON value; None if the file does not exist.

    If the JSON is invalid, raise an error with this hint.
    """
    text = read_text(path)
    if text is None:
        return None
    try:
        value: Json = json.loads(text)
        return value
    except ValueError as error:
        raise damaged(path, str(error), hint) from error


def damaged(path: Path, why: str, hint: str = "") -> DalsegnoError:
    """Return the error for a damaged file that Dal Segno wrote. The default hint applies to files of a cluster."""
    return DalsegnoError(f"{path} is damaged: {why}", hint=hint or "remove its cluster with `dalsegno down`")


def explain(error: OSError, path: Path, *, named: bool = False) -> DalsegnoError:
    """Return a DalsegnoError for a failed write, with a hint. `named` says that the user named the path with `-o`."""
    elsewhere = "name another file with `-o`" if named else _ELSEWHERE
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        disk = "name a file on another disk with `-o`" if named else _OTHER_DISK
        return DalsegnoError(f"no space left to write {path}", hint=f"free some space, or {disk}")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DalsegnoError(f"no permission to write {path}", hint=f"use sudo, or {elsewhere}")
    if error.errno == errno.EROFS:
        return DalsegnoError(f"{path} is on a read-only file system", hint=elsewhere)
    return DalsegnoError(f"cannot write {path}: {error.strerror}", hint=f"check that path, or {elsewhere}")


def closed_to_others(*paths: Path) -> Path | None:
    """Return the first folder or file on these paths that other users may not enter or read; None if there is none."""
    for path in dict.fromkeys([*paths, *(path.resolve() for path in paths)]):
        for each in (*reversed(path.parents), path):
            try:
                mode = each.stat().st_mode
            except OSError:
                return None  # a missing path is reported elsewhere
            needed = 0o001 if each != path else 0o005 if stat.S_ISDIR(mode) else 0o004
            if mode & needed != needed:
                return each
    return None


def owner_name(path: Path) -> str:
    """Return the name of a path's owner, or the uid if this machine does not know the user."""
    return user_of(path.stat().st_uid)


def user_of(uid: int) -> str:
    """Return the name of a user, or the uid if this machine does not know the user."""
    return find_user(uid) or f"uid {uid}"


def find_user(uid: int) -> str:
    """Return the name of a user; "" if this machine does not know the user."""
    import pwd  # Windows does not have this module

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return ""


def make_folder(path: Path, mode: int = 0o755) -> None:
    """Create a folder and its missing parents with this mode, whatever the umask is.

    An existing folder is not an error.
    """
    try:
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
    except OSError as error:
        raise explain(error, path) from error


def remove_tree(path: Path) -> None:
    """Remove a folder and its content.

    It is not an error if the folder is missing or another process removes it at the same time. Folders in it may belong
    to users who change them in the meantime. Therefore everything below `path` is opened from its parent's descriptor,
    no link is followed, and other file systems mounted there are not touched.
    """
    tries = 5
    while True:
        try:
            top = _open_own(path)
        except FileNotFoundError:
            return
        try:
            moved = _empty(top, top, 0)
        finally:
            os.close(top)
        try:
            os.rmdir(path)
            return
        except FileNotFoundError:
            return
        except OSError:
            tries -= not moved
            if tries < 0:
                raise
            time.sleep(0.0 if moved else 0.02)  # a daemon that was just killed may still write a file


def _empty(folder: int, top: int, depth: int) -> int:
    """Remove as much of an open folder's content as possible.

    Return how many folders were moved up because they are too deep.
    """
    moved = 0
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        for name, is_folder in entries:
            with contextlib.suppress(OSError):
                if not is_folder:
                    os.unlink(name, dir_fd=folder)
                elif depth >= _MAX_DEPTH:
                    os.rename(name, f".deep.{os.urandom(8).hex()}", src_dir_fd=folder, dst_dir_fd=top)
                    moved += 1
                else:
                    moved += _empty_below(name, folder, top, depth + 1)
                    os.rmdir(name, dir_fd=folder)
    return moved


def _empty_below(name: str, folder: int, top: int, depth: int) -> int:
    child = _open_own(name, folder)
    try:
        return _empty(child, top, depth) if os.fstat(child).st_dev == os.fstat(top).st_dev else 0
    finally:
        os.close(child)


def _open_own(name: str | Path, parent: int | None = None) -> int:
    """Open a folder. If this user owns it but lacks permissions, as in an unpacked image, change its mode first.

    Root needs no permissions, so it never changes the mode of a user's folder.
    """
    if os.geteuid() == 0:
        return os.open(name, _FOLDER, dir_fd=parent)
    place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        status = os.fstat(place)
        if status.st_uid == os.geteuid() and status.st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{place}", 0o700)
        return os.open(".", _FOLDER, dir_fd=place)
    finally:
        os.close(place)


@contextlib.contextmanager
def locked(path: Path, who: str, *, shared: bool = False, wait_s: float = 0.1) -> Iterator[None]:
    """Hold a lock file, exclusive or shared. Raise an error if another process holds it for longer than `wait_s`.

    A lock is released when its process ends. The wait is needed because a process that only tests the lock also holds
    it briefly.
    """
    try:
        import fcntl
    except ImportError:
        raise DalsegnoError(
            "clusters on this machine need Linux", hint="from here, use a remote target, such as `target: ssh`"
        ) from None
    make_folder(path.parent)
    # With another mode than 0600, any user could open the file and hold the lock. O_NOFOLLOW prevents root from
    # following another user's link.
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
    """Hold a lock file, exclusive or shared, after waiting for its current holders.

    The lock is released when the holder ends.
    """
    import fcntl

    make_folder(path.parent)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+") as file:
        if not _take(file, kind):
            on_wait()
            fcntl.flock(file, kind)
        yield
