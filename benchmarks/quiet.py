"""Check whether the machine is idle: figures from a busy machine mean little."""

from __future__ import annotations

import time
from pathlib import Path

QUIET = 0.15
PATIENCE_S = 120.0


def wait_for_quiet(patience_s: float = PATIENCE_S) -> float:
    """Wait until the machine is idle, for at most `patience_s`. Return the busy share of all cores at the end."""
    until = time.monotonic() + patience_s
    while (busy := busy_share()) > QUIET and time.monotonic() < until:
        time.sleep(1.0)
    return busy


def busy_share(over_s: float = 0.3) -> float:
    total, idle = _ticks()
    time.sleep(over_s)
    later_total, later_idle = _ticks()
    return 1 - (later_idle - idle) / max(later_total - total, 1)


def _ticks() -> tuple[int, int]:
    """Return the total CPU time and its idle part."""
    values = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(values[:8]), values[3] + values[4]


def available_mib() -> int:
    """Return the available memory."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) // 1024
