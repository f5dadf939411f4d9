"""What an earlier agent of the same run left on this node when it was killed: processes, and folders of logs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

from dalsegno.launch.agent.procs import environment, own_processes
from dalsegno.launch.agent.streaming import left_folders
from dalsegno.train.contract import RUN


def sweep(run: str, node: str) -> list[int]:
    """Processes are found by their environment, and ended.

    Where Slurm tracks processes by cgroup there is nothing left; elsewhere orphans in sessions of their own are.
    """
    marks = {f"{RUN}={run}".encode(), f"SLURMD_NODENAME={node}".encode()}
    left = [pid for pid in own_processes() if marks <= environment(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for folder in left_folders(run, node):
        shutil.rmtree(folder, ignore_errors=True)
    return left
