"""Images that jobs had to unpack, where neither the kernel nor FUSE mounts them for their user: `native/unpack.c`.

FOLDER/KEY          what is in the image; the key is its file's own identity
FOLDER/KEY.image    the path it was found at; locked by every step that uses it
FOLDER/lock         held by whoever unpacks or removes
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dalsegno.containers.store import Swept
from dalsegno.system.files import remove_tree


def sweep_unpacked(folder: Path) -> Swept:
    """Remove what no image leads to any more, and no step uses; what was cut short too. Nothing while one unpacks."""
    removed = size = 0
    if not _is_own(folder):
        return Swept(0, 0)
    with _alone(folder / "lock") as ours:
        for path in _stale(folder) if ours else []:
            with _alone(path.with_name(f"{path.name}.image")) as unused:
                if unused:
                    size += _size(path)
                    remove_tree(path)
                    path.with_name(f"{path.name}.image").unlink(missing_ok=True)
                    removed += 1
    return Swept(removed, size)


def key_of(image: Path) -> str:
    """As `native/unpack.c` writes it; "" if there is no such file."""
    try:
        about = image.stat()
    except OSError:
        return ""
    return f"{about.st_dev:x}-{about.st_ino:x}-{about.st_size:x}-{about.st_mtime_ns:x}"


def _is_own(folder: Path) -> bool:
    try:
        about = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022


def _stale(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return [path for path in found if key_of(_image_of(path)) != path.name]


def _image_of(unpacked: Path) -> Path:
    try:
        handle = os.open(unpacked.with_name(f"{unpacked.name}.image"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            return Path(os.fsdecode(file.read(4096)) or "/nowhere")
    except (OSError, ValueError):
        return Path("/nowhere")


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether nobody else has it locked; where there is no such file, nobody can."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _take(handle)
    finally:
        os.close(handle)


def _take(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(folder: Path) -> int:
    files = (os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)
    size = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # a step that ends removes some itself
            size += os.lstat(path).st_blocks * 512
    return size
