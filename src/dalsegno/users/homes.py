"""Create and delete home folders, and install SSH keys in them.

Root creates and writes files relative to file descriptors, because the owner of a home may change a path at any time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from dalsegno.errors import DalsegnoError

HOME_MODE = 0o700
KEYS = "authorized_keys"
FIRST_LINE = "# Keys of the cluster, kept by Dal Segno. Add your own keys outside of these two lines."
LAST_LINE = "# End of the cluster's keys."
MAX_BYTES = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_home(homes: Path, name: str, uid: int, gid: int) -> bool:
    """Create the home of a user with mode HOME_MODE. Return False if it already exists.

    The folder is created under a temporary name and renamed after its owner is set, so that it never has a wrong owner.
    """
    parent = os.open(homes, _FOLDER)
    try:
        if _exists(name, parent):
            return False
        part = f".new.{os.urandom(8).hex()}"
        os.mkdir(part, HOME_MODE, dir_fd=parent)
        try:
            home = os.open(part, _FOLDER, dir_fd=parent)
            try:
                os.fchmod(home, HOME_MODE)  # again, because the umask may have removed bits when the folder was created
                _give(home, uid, gid)
            finally:
                os.close(home)
            os.rename(part, name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError:
            os.rmdir(part, dir_fd=parent)
            raise
        return True
    finally:
        os.close(parent)


def _exists(name: str, parent: int) -> bool:
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _give(handle: int, uid: int, gid: int) -> None:
    if os.geteuid() == 0:
        os.fchown(handle, uid, gid)


def install_keys(homes: Path, name: str, uid: int, gid: int, keys: Sequence[str]) -> bool:
    """Write these keys into the cluster's part of a user's authorized_keys. Return whether the file was changed.

    Other lines of the file belong to the user and are kept. Without keys, no file is created.
    """
    try:
        return _install(homes, name, uid, gid, keys)
    except OSError as error:
        raise DalsegnoError(
            f"the SSH keys of {name} cannot be installed: {error.strerror or error}",
            where=str(homes / name / ".ssh" / KEYS),
            hint=f"{name} must own the folder .ssh and the file in it, and neither may be a link",
        ) from error


def _install(homes: Path, name: str, uid: int, gid: int, keys: Sequence[str]) -> bool:
    parent = os.open(homes, _FOLDER)
    try:
        home = _own_folder(name, parent, uid)
    finally:
        os.close(parent)
    try:
        if not keys and not _exists(".ssh", home):
            return False
        if not _exists(".ssh", home):
            _make_ssh_folder(home, uid, gid)
        folder = _own_folder(".ssh", home, uid)
    finally:
        os.close(home)
    try:
        found = _read(folder, uid)
        text = with_keys(found, keys)
        if text == found:
            return False
        _write(folder, text, uid, gid)
        return True
    finally:
        os.close(folder)


def _make_ssh_folder(home: int, uid: int, gid: int) -> None:
    os.mkdir(".ssh", HOME_MODE, dir_fd=home)
    made = os.open(".ssh", _FOLDER, dir_fd=home)
    try:
        if os.listdir(made):  # the user has put another folder in its place, which may contain other people's files
            raise PermissionError(".ssh was replaced")
        _give(made, uid, gid)
    finally:
        os.close(made)


def _own_folder(name: str, parent: int, uid: int) -> int:
    folder = os.open(name, _FOLDER, dir_fd=parent)
    if os.fstat(folder).st_uid != uid:
        os.close(folder)
        raise PermissionError(f"{name} belongs to another user")
    return folder


def _read(folder: int, uid: int) -> str:
    try:
        handle = os.open(KEYS, _FILE, dir_fd=folder)
    except FileNotFoundError:
        return ""
    with open(handle, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode) or about.st_uid != uid:
            raise PermissionError(f"{KEYS} is not a file of its owner")
        if about.st_size > MAX_BYTES:
            raise PermissionError(f"{KEYS} is longer than {MAX_BYTES >> 20} MiB")
        return file.read(MAX_BYTES).decode(errors="surrogateescape")


def _write(folder: int, text: str, uid: int, gid: int) -> None:
    part = f".{KEYS}.{os.urandom(8).hex()}"
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text.encode(errors="surrogateescape"))
            file.flush()
            _give(file.fileno(), uid, gid)
            os.fsync(file.fileno())
        os.replace(part, KEYS, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.unlink(part, dir_fd=folder)
        raise


def with_keys(text: str, keys: Sequence[str]) -> str:
    """Return the text of authorized_keys with these keys in the cluster's block. If there are no keys, remove the
    block.

    If the last line of the block is missing, all lines count as the user's own.
    """
    lines = text.removesuffix("\n").split("\n") if text else []
    if not keys and FIRST_LINE not in lines:
        return text
    own: list[str] = []
    inside = False
    for line in lines:
        if line == FIRST_LINE:
            inside = True
        elif line == LAST_LINE:
            inside = False
        elif not inside:
            own.append(line)
    if FIRST_LINE in lines and LAST_LINE not in lines:
        own = [line for line in lines if line != FIRST_LINE]
    block = [FIRST_LINE, *keys, LAST_LINE] if keys else []
    return "".join(f"{line}\n" for line in [*block, *own])


def check_home(home: Path, uid: int | None) -> None:
    """Raise if a home folder belongs to somebody else. This can happen on storage that others use too."""
    try:
        owner = home.lstat().st_uid
    except FileNotFoundError:
        return
    if owner != uid:
        raise DalsegnoError(
            f"{home} belongs to uid {owner}, not to the user, and is not deleted", hint="leave out `--remove-home`"
        )


def remove_home(home: Path, uid: int) -> None:
    """Delete the home folder of a user with everything in it.

    Raise if other users can change the parent folder, because they could replace the home during the deletion.
    `remove_tree` follows no link below the folder, and enters no other file system.
    """
    from dalsegno.system.files import remove_tree  # imported here, because machines get this module alone

    about = home.parent.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
        raise DalsegnoError(
            f"{home.parent} is writable by users, so {home} was not deleted",
            hint=f"run `chmod 755 {home.parent}` first, or delete the folder yourself",
        )
    check_home(home, uid)
    try:
        remove_tree(home)
    except OSError as error:
        raise DalsegnoError(
            f"{home} cannot be deleted: {error.strerror}", hint="delete it on the machine that serves it"
        ) from error
