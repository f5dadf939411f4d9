"""What an earlier agent of the same run left on this node when it was killed: found by its environment, and ended."""

from __future__ import annotations

import contextlib
import os
import signal

from dalsegno.launch.agent.procs import environment, own_processes
from dalsegno.train.contract import RUN


def sweep(run: str, node: str) -> list[int]:
    """Where Slurm tracks processes by cgroup there is nothing left; elsewhere orphans in sessions of their own are."""
    marks = {f"{RUN}={run}".encode(), f"SLURMD_NODENAME={node}".encode()}
    left = [pid for pid in own_processes() if marks <= environment(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left
