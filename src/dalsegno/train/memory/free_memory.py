"""Check whether snapshots fit into this machine's memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dalsegno.train.errors import NotEnoughMemory

RESERVE = 256 << 20  # memory that stays free for training itself
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class FreeMemory:
    """Free memory in bytes. `cgroup` is None if there is no readable limit."""

    shm: int
    memory: int
    cgroup: int | None = None
    folder: str = "/dev/shm"

    @property
    def for_snapshots(self) -> int:
        limits = [self.memory] if self.cgroup is None else [self.memory, self.cgroup]
        return max(0, min(self.shm, min(limits) - RESERVE))


def describe_use(needed: int, slots: int, ranks: int) -> str:
    """Return a sentence about the memory that snapshots take on this machine."""
    each = f" for each of {ranks} ranks on this node" if ranks > 1 else ""
    return f"{slots} snapshots{each} take {_gib(needed)} of memory"


def check_free_memory(needed: int, free: FreeMemory, slots: int, ranks: int = 1) -> None:
    """Raise NotEnoughMemory if the snapshots do not fit.

    `needed` is the number of bytes still to allocate, for all ranks of this machine.
    """
    if needed <= free.for_snapshots:
        return
    limited = "" if free.cgroup is None else f", {_gib(free.cgroup)} below the job's memory limit"
    raise NotEnoughMemory(
        f"snapshots in memory need {_gib(needed)} more ({slots} slots for each of {ranks} ranks on this node), but only"
        f" {_gib(free.shm)} are free in {free.folder}, {_gib(free.memory)} of memory are available{limited}",
        f"enlarge {free.folder}, request more memory, use fewer slots, or save to disk only (memory_every=None)",
    )


def read_free_memory(folder: Path, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> FreeMemory:
    try:
        disk = os.statvfs(folder)
    except FileNotFoundError:  # a run that ended has removed the empty folder
        disk = os.statvfs(folder.parent)
    return FreeMemory(disk.f_bavail * disk.f_frsize, _available(proc), _below_limit(proc, cgroups), str(folder))


def _available(proc: Path) -> int:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _below_limit(proc: Path, cgroups: Path) -> int | None:
    """Return the least memory left under any cgroup limit of this process; None if there is no limit."""
    left: list[int] = []
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            left += _along(cgroups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            left += _along(cgroups, path, "memory.max", "memory.current")
    return min(left, default=None)


def _along(top: Path, path: str, limit: str, usage: str) -> list[int]:
    """Return the memory left in each cgroup from this one up to the top.

    In a container, only the top may be visible.
    """
    here = top / path.lstrip("/")
    groups = [group for group in (here, *here.parents) if group == top or top in group.parents]
    return [left for group in groups if (left := _left_in(group, limit, usage)) is not None]


def _left_in(group: Path, limit: str, usage: str) -> int | None:
    most, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not (most.isdigit() and used.isdigit()) or int(most) >= _UNLIMITED:
        return None
    return max(0, int(most) - int(used) + _reclaimable(_text(group / "memory.stat")))


def _reclaimable(stat: str) -> int:
    """Return the size of the inactive file cache, which counts as used but is freed on demand."""
    known = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
    return int(known.get("total_inactive_file", known.get("inactive_file", 0)))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
