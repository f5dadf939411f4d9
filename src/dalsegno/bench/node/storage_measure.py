"""Measure folders from one node: writes with fsync, reads, and the creation of files. Does not import torch.

`bench-storage '{"folders": ["/fsx", "/tmp"], …}'` prints a JSON line for each folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from dalsegno.storage.probe import PREFIX, file_rate, find_mount, write_speed

_BLOCK = 1 << 20
# Types of file systems that several hosts can use at the same time.
_SHARED_TYPES = ("nfs", "lustre", "fuse", "beegfs", "wekafs", "gpfs", "ceph", "9p", "cifs", "smb3", "panfs", "efs")


@dataclass(frozen=True)
class FolderSpeed:
    """The speed of one folder, seen from one node. `error` says why it was not measured; "" if it was."""

    host: str
    folder: str
    fstype: str = ""
    write_mb_per_s: float = 0.0
    read_mb_per_s: float = 0.0
    files_per_s: float = 0.0
    error: str = ""

    @property
    def shared(self) -> bool:
        return self.fstype.startswith(_SHARED_TYPES)


def measure_folder(folder: str, most: int, seconds: float) -> FolderSpeed:
    """Measure one folder by means of a temporary file and a temporary folder in it."""
    host = socket.gethostname().partition(".")[0]
    with open("/proc/self/mountinfo") as file:
        fstype = find_mount(file.read(), os.path.realpath(folder))[1]
    path = os.path.join(folder, f"{PREFIX}{secrets.token_hex(8)}.{host}")
    try:
        try:
            written = write_speed(path, most, seconds, keep=True)
            read = read_speed(path, seconds)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return FolderSpeed(host, folder, fstype, written, read, file_rate(path))
    except OSError as error:
        return FolderSpeed(host, folder, fstype, error=error.strerror or str(error))


def read_speed(path: str, seconds: float) -> float:
    """Return the speed in MB/s at which this node reads a file that it has just written, without the page cache."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        count, began = 0, time.monotonic()
        while time.monotonic() - began < seconds and (piece := os.read(handle, _BLOCK)):
            count += len(piece)
        return count / 1e6 / max(time.monotonic() - began, 1e-6)
    finally:
        os.close(handle)


def main(arguments: Sequence[str]) -> int:
    """Measure each folder and print a line for it."""
    order = json.loads(arguments[0])
    for folder in order["folders"]:
        speed = measure_folder(str(folder), int(order["size"]), float(order["seconds"]))
        sys.stdout.write(json.dumps(asdict(speed)) + "\n")
        sys.stdout.flush()
    return 0


# The report for users


def read_speeds(text: str) -> list[FolderSpeed]:
    """Parse the lines that all nodes printed."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            found.append(FolderSpeed(**json.loads(line)))
    return found


HEADERS = ("FOLDER", "TYPE", "NODES", "WRITE", "READ", "FILES", "SLOWEST WRITE", "ALL NODES")


def table_rows(speeds: Iterable[FolderSpeed]) -> list[list[str]]:
    """Return a row per folder: the median of the nodes, the slowest node, and the sum of all nodes."""
    by_folder: dict[str, list[FolderSpeed]] = {}
    for each in speeds:
        by_folder.setdefault(each.folder, []).append(each)
    rows = []
    for folder, found in by_folder.items():
        good = [each for each in found if not each.error]
        if not good:
            rows.append([folder, found[0].fstype or "-", "0", "-", "-", "-", "-", "-"])
            continue
        slowest = min(good, key=lambda each: each.write_mb_per_s)
        rows.append(
            [
                folder,
                f"{good[0].fstype} ({'shared' if good[0].shared else 'local'})",
                str(len(good)),
                f"{median(each.write_mb_per_s for each in good):.0f} MB/s",
                f"{median(each.read_mb_per_s for each in good):.0f} MB/s",
                f"{median(each.files_per_s for each in good):.0f}/s",
                f"{slowest.host} {slowest.write_mb_per_s:.0f} MB/s",
                f"{sum(each.write_mb_per_s for each in good):.0f} MB/s",
            ]
        )
    return rows


def compare(speeds: Sequence[FolderSpeed]) -> list[str]:
    """Return a sentence that compares the median of the shared folders with that of the local ones; [] if either kind
    is missing."""
    good = [each for each in speeds if not each.error]
    shared, local = ([each for each in good if each.shared is wanted] for wanted in (True, False))
    if not shared or not local:
        return []
    parts = []
    for verb, name in (("writes", "write_mb_per_s"), ("reads", "read_mb_per_s"), ("creates files", "files_per_s")):
        there, here = (median(getattr(each, name) for each in group) for group in (shared, local))
        parts += [f"{verb} at {there / here:.0%}"] if here else []
    return [f"{_folders(shared)} {', '.join(parts)} of the speed of {_folders(local)}"]


def _folders(speeds: Iterable[FolderSpeed]) -> str:
    folders = list(dict.fromkeys(each.folder for each in speeds))
    return f"the median of {', '.join(folders)}" if len(folders) > 1 else folders[0]
