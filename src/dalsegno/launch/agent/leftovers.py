"""What an earlier agent of the same run left on this node when it was killed: found by its environment, and ended."""

from __future__ import annotations

import contextlib
import os
import signal

from dalsegno.train.contract import RUN


def sweep(run: str, node: str) -> list[int]:
    """Where Slurm tracks processes by cgroup there is nothing left; elsewhere orphans in sessions of their own are."""
    marks = {f"{RUN}={run}".encode(), f"SLURMD_NODENAME={node}".encode()}
    left = [pid for pid in _own_processes() if marks <= _environment(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _own_processes() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid() and int(name) != os.getpid():
                found.append(int(name))
    return found


def _environment(pid: int) -> set[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except OSError:
        return set()
