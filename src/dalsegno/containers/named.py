"""List and remove a user's named containers. The container plugin does this in a small job step on each node."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.containers.plugstack.hosts import HostRoute, Progress, last_line, run_on_each, send
from dalsegno.containers.store import RemovedFiles
from dalsegno.system.files import remove_tree
from dalsegno.system.processes import Completed, Runner

_PREFIX = "dalsegno: "  # the plugin starts each message with this text
# The start of an error message: the prefix, the node and the exit code. Older plugins print no exit code.
_REFUSED = re.compile(r"dalsegno: (?:[^\s:]+: container(?:\[\d+\])?: )?")


@dataclass(frozen=True)
class NamedContainer:
    """One named container on a node."""

    node: str
    name: str
    image: str  # the image, as the user named it
    in_use: bool
    used: float  # when a step last used it, in seconds since 1970


@dataclass(frozen=True)
class NodeAnswer:
    """The answer from a node; `error` is empty if the node succeeded."""

    node: str
    lines: tuple[str, ...] = ()
    error: str = ""


def list_named(runner: Runner, route: HostRoute, nodes: Sequence[str], progress: Progress) -> list[NodeAnswer]:
    """Return the lists of this user's named containers from all nodes; `parse_listing` parses them."""
    return run_on_each(runner, lambda runner, node: _step(runner, route, node, "--container-list"), nodes, progress)


def remove_named(
    runner: Runner, route: HostRoute, nodes: Sequence[str], names: Sequence[str], progress: Progress
) -> list[NodeAnswer]:
    """Remove this user's containers with these names from all nodes. The lines of an answer are the removed names."""
    word = f"--container-remove={','.join(names)}"
    return run_on_each(runner, lambda runner, node: _step(runner, route, node, word), nodes, progress)


def parse_listing(answer: NodeAnswer) -> list[NamedContainer]:
    """Parse tab-separated lines: name, in use (0 or 1), time of last use, image. Skip lines of another form."""
    found = []
    for line in answer.lines:
        words = line.split("\t", 3)
        if len(words) == 4 and words[1] in ("0", "1") and words[2].isdecimal():
            found.append(NamedContainer(answer.node, words[0], words[3], words[1] == "1", float(words[2])))
    return found


def _step(runner: Runner, route: HostRoute, node: str, word: str) -> NodeAnswer:
    if node in route.closed:
        return NodeAnswer(node, error=route.closed[node])
    done = send(runner, route, node, [word, "true"])
    if done.exit_code == 0:
        return NodeAnswer(node, tuple(done.stdout.splitlines()))
    return NodeAnswer(node, error=_why(done))


def _why(done: Completed) -> str:
    """Return the reason why a step failed: the plugin's message without the node's name, a sentence if srun does not
    know the plugin, or the last line of the output."""
    ours = [line for line in done.stderr.splitlines() if line.startswith(_PREFIX)]
    if ours:
        return _REFUSED.sub("", ours[0], count=1)
    if "unrecognized option" in done.stderr:
        return "its Slurm does not have Dal Segno's plugin, or has an older one"
    return last_line(done)


# Unpacked images: `native/unpack.c` makes them where neither the kernel nor FUSE mounts an image for the user


def sweep_unpacked(folder: Path) -> RemovedFiles:
    """Remove unpacked images that no step uses if they are incomplete, or their image file has changed or is missing.

    While a step is unpacking an image, remove nothing.
    """
    removed = size = 0
    if not _is_own(folder):
        return RemovedFiles(0, 0)
    with _try_lock(folder / "lock") as ours:
        for path in _stale(folder) if ours else []:
            with _try_lock(path.with_name(f"{path.name}.image")) as unused:
                if unused:
                    size += _size(path)
                    remove_tree(path)
                    path.with_name(f"{path.name}.image").unlink(missing_ok=True)
                    removed += 1
    return RemovedFiles(removed, size)


def unpacked_key(image: Path) -> str:
    """Return the name of the folder into which `native/unpack.c` unpacks an image; "" if the image is missing."""
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
    return [path for path in found if unpacked_key(_image_of(path)) != path.name]


def _image_of(unpacked: Path) -> Path:
    try:
        handle = os.open(unpacked.with_name(f"{unpacked.name}.image"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            return Path(os.fsdecode(file.read(4096)) or "/nowhere")
    except (OSError, ValueError):
        return Path("/nowhere")


@contextlib.contextmanager
def _try_lock(path: Path) -> Iterator[bool]:
    """Try to lock a file; yield False if another process holds the lock. If the file is missing, yield True."""
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
        with contextlib.suppress(FileNotFoundError):  # a step may be removing files as it ends
            size += os.lstat(path).st_blocks * 512
    return size
