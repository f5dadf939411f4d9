"""What agents that were killed left on this node: processes and logs of the same run, memory of runs long gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from dalsegno.launch.agent.procs import environment, own_processes
from dalsegno.launch.agent.streaming import left_folders
from dalsegno.train.contract import RUN
from dalsegno.train.memory import files
from dalsegno.train.memory.files import sweep_abandoned

LONG_GONE_S = 24 * 3600.0


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


def sweep_long_gone(now: float | None = None, folder: Path | None = None) -> list[str]:
    """Snapshots of this user's runs of which nothing was written for a day, and nothing runs here; the runs' ids.

    A run sweeps its nodes when it ends, but for those that it had lost by then: where there is a node agent it sees to
    them within a minute.
    """
    sweep_abandoned(folder)
    before = (time.time() if now is None else now) - LONG_GONE_S
    old = [run for run in files.forgotten(before, folder) if not run.startswith(files.ALONE)]
    alive = {entry.partition(b"=")[2] for pid in own_processes() for entry in environment(pid)} if old else set()
    gone = [run for run in old if run.encode() not in alive]
    for run in gone:
        files.sweep(run, folder)
    return gone
