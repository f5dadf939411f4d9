"""Read what the doctor needs from this machine: texts, Python environments, file systems, ports, snapshots, dumps.

All reads are bounded, and no file is run. The doctor may run as root, and the files may belong to another user.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import socket
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO

from dalsegno.doctor.case import FoundSnapshot, PathPlace, PythonFound
from dalsegno.doctor.logs import LogEnd, SignSeen, find_end, find_signs
from dalsegno.runs.flight_recorder import MAX_ALL_CALLS, MAX_DUMP_BYTES, BadDump, FlightDump, read_dump
from dalsegno.storage.probe import find_mount

HEAD_BYTES, TAIL_BYTES = 4 << 20, 28 << 20  # a longer log is searched only at its start and its end
END_BYTES = 1 << 20  # the last error of a log is searched for in this much of its end
_BLOCK = 1 << 20
_MANIFEST_BYTES = 64 << 20
_NETWORK = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "cephfs", "wekafs", "panfs", "pvfs2", "9p",
    "virtiofs", "cifs", "smb3", "afs", "glusterfs",
)  # fmt: skip
_OWN = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch")  # folders that are local to each machine
_RANK_OF_DUMP = re.compile(r".*?(?<!\d)(\d{1,9})(?:\.json)?")


def open_text(path: Path, owners: Collection[int] = ()) -> int | None:
    """Open a file for reading; None if it is not a regular file, cannot be read, or does not belong to these users.

    A device is not opened, because opening can have effects: a watchdog device then restarts the machine.
    """
    on_linux = hasattr(os, "O_PATH")
    try:
        seen = os.open(path, (os.O_PATH if on_linux else os.O_RDONLY | os.O_NONBLOCK) | os.O_CLOEXEC)
    except (OSError, ValueError):  # ValueError if the path contains a NUL character
        return None
    try:
        about = os.fstat(seen)
        if not stat.S_ISREG(about.st_mode) or (owners and about.st_uid not in owners):
            return None
        return os.open(f"/proc/self/fd/{seen}", os.O_RDONLY | os.O_CLOEXEC) if on_linux else os.dup(seen)
    except OSError:
        return None
    finally:
        os.close(seen)


def read_start(path: Path, most_bytes: int, owners: Collection[int] = ()) -> str | None:
    """Return the start of a text file; None if it cannot be read."""
    handle = open_text(path, owners)
    if handle is None:
        return None
    with open(handle, "rb") as file:
        return file.read(most_bytes).decode(errors="replace")


def numbered_lines(
    path: Path, head: int = HEAD_BYTES, tail: int = TAIL_BYTES, owners: Collection[int] = ()
) -> Iterator[tuple[int, str]]:
    """Yield the lines of a log with their numbers. Of a long log, yield only the lines at its start and its end."""
    handle = open_text(path, owners)
    if handle is None:
        return
    with open(handle, "rb") as file:
        size = os.fstat(handle).st_size
        number = 0
        for part in [size] if size <= head + tail else [head, tail]:
            if file.tell() and part != size:
                number += _skip(file, size - tail - file.tell())
            for line in file.read(part).decode(errors="replace").split("\n"):
                number += 1
                yield number, line
            number -= 1  # the last line of this part continues in the next part


def _skip(file: IO[bytes], count: int) -> int:
    """Skip bytes and return how many lines end in the skipped part."""
    lines = 0
    while count > 0:
        data = file.read(min(count, _BLOCK))
        if not data:
            break
        count, lines = count - len(data), lines + data.count(b"\n")
    return lines


def signs_in(path: Path, name: str = "", owners: Collection[int] = ()) -> list[SignSeen]:
    return list(find_signs(numbered_lines(path, owners=owners), name or str(path)))


def end_of(path: Path, name: str = "", owners: Collection[int] = ()) -> LogEnd:
    return find_end(numbered_lines(path, head=1, tail=END_BYTES, owners=owners), name or str(path))


# Facts about paths


def place_of(path: str, mountinfo: str) -> PathPlace:
    """Return the file system of a path and this user's permissions on it."""
    if "\0" in path:
        return PathPlace(path)
    real = os.path.realpath(path)
    _, fstype, _, _ = find_mount(mountinfo, real)
    shared: bool | None = fstype in _NETWORK or fstype.startswith("fuse.")
    if fstype in ("", "overlay"):
        shared = None  # inside a container, the file system is unknown
    if real.startswith(tuple(f"{own}/" for own in _OWN)) and fstype not in _NETWORK:
        shared = False
    modes = (("r", os.R_OK), ("w", os.W_OK), ("x", os.X_OK))
    mode = "".join(letter for letter, right in modes if os.access(real, right)) if os.path.exists(real) else ""
    return PathPlace(path, fstype, shared, mode or ("-" if os.path.exists(real) else ""))


def port_is_taken(port: int) -> bool:
    """Return whether a process of this machine listens on a port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except OSError:
            return True
    return False


# Python environments, from their files


def look_at_python(python: str, env: Mapping[str, str], mountinfo: str, active: bool = True) -> PythonFound:
    """Return the facts about a Python environment. Its Python is not started, because another user may own it."""
    place = place_of(python, mountinfo)
    if (read_start(Path(python), 2) or "#!") == "#!":  # the file does not exist, or is a wrapper script of pyenv
        return PythonFound(python, place, None, None, active)
    for folder in _package_folders(python, env):
        version = read_start(folder / "torch/version.py", 1 << 16)
        if version is not None:
            return PythonFound(python, place, *_torch_version(version), active=active)
    return PythonFound(python, place, "", None, active)


def _package_folders(python: str, env: Mapping[str, str]) -> Iterator[Path]:
    yield from (Path(each) for each in env.get("PYTHONPATH", "").split(":") if each)
    prefix = Path(os.path.abspath(python)).parent.parent
    own = (prefix / "pyvenv.cfg").exists()
    yield from sorted(prefix.glob("lib*/python3*/site-packages"))
    if not own or "include-system-site-packages = true" in (read_start(prefix / "pyvenv.cfg", 4096) or ""):
        yield from sorted(Path("/usr/local/lib").glob("python3*/dist-packages"))
        yield from sorted(Path("/usr/lib").glob("python3*/dist-packages"))
        yield from sorted(Path(env.get("HOME", "/nonexistent")).glob(".local/lib/python3*/site-packages"))


def _torch_version(text: str) -> tuple[str, bool | None]:
    """Return torch's version, and whether torch was built for CUDA or ROCm, from the text of torch/version.py."""
    values: dict[str, object] = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "unknown", None
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                values[target.id] = node.value.value
    gpu = values.get("cuda") is not None or values.get("hip") is not None
    return str(values.get("__version__", "unknown")), gpu if "cuda" in values else None


# Snapshots, and how many ranks wrote them


_DEEPSPEED = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_DCP = re.compile(r"__(\d+)_\d+\.distcp")
_PER_RANK = re.compile(r".*rank[_-]?(\d+)\D*\.(?:pt|pth|bin|ckpt)")


def find_snapshot(folder: Path, owners: Collection[int] = ()) -> FoundSnapshot | None:
    """Return the newest snapshot in a folder and the number of ranks that wrote it; None if there is none."""
    from dalsegno.train.disk.format import MANIFEST, parse
    from dalsegno.train.disk.verify import list_steps

    try:
        for step in list_steps(folder)[:3]:
            text = read_start(step / MANIFEST, _MANIFEST_BYTES, owners)
            if text is not None:
                with contextlib.suppress(ValueError, RecursionError):
                    return FoundSnapshot(str(step), parse(text).world, "checkpoint of Dal Segno")
        below = sorted((each for each in os.scandir(folder) if each.is_dir()), key=lambda each: -each.stat().st_mtime)
        folders = [folder, *(Path(each.path) for each in below[:8])]
    except OSError:
        return None
    for each in folders:
        try:
            names = os.listdir(each)
        except OSError:
            continue
        for pattern, kind, same in (
            (_DEEPSPEED, "DeepSpeed's ZeRO checkpoint", True),
            (_DCP, "distributed checkpoint of PyTorch", False),
            (_PER_RANK, "a file for each rank", True),
        ):
            ranks = {found.groups() if same else found[1] for name in names if (found := pattern.fullmatch(name))}
            if len(ranks) > 1:
                return FoundSnapshot(str(each), len(ranks), kind, same)
    return None


# Dumps of the flight recorder


def read_dump_files(paths: list[Path], owner: int) -> list[tuple[Path, FlightDump]]:
    """Return the dumps among these files. Files of other users are not read."""
    found = dict[int, tuple[Path, FlightDump]]()
    left = MAX_ALL_CALLS
    for path in sorted(paths)[:8192]:
        named = _RANK_OF_DUMP.fullmatch(path.name)
        handle = open_text(path, {owner}) if named else None
        if handle is None or named is None:
            continue
        with open(handle, "rb") as file:
            try:
                dump = read_dump(file.read(MAX_DUMP_BYTES + 1), int(named[1]))
            except BadDump:
                continue
        left -= len(dump.calls)
        if left < 0:
            break
        found[dump.rank] = path, dump
    return [found[rank] for rank in sorted(found)]
