"""What a run left in this node's shared memory when it had lost the node: swept once nobody is left who could use it.

A run sweeps the nodes that it has when it ends. One that it was cut off from, and gave back, it cannot reach any more;
Slurm has ended its agent there without a word. Snapshots outlive their agent on purpose, so there is a time of grace.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from dalsegno.system import procfs
from dalsegno.train.contract import RUN
from dalsegno.train.memory.names import ALONE, FOLDER, last_written, sweep

EVERY_S = 10.0
FRESH_S = 10.0  # what was written a moment ago is in use: then no process is looked at
UNUSED_S = 30.0  # longer than a run needs to start another agent

Run = tuple[int, str]  # whose, and its id


class MemoryOfRuns:
    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder, self._due = folder, float("-inf")
        self._unused: dict[Run, float] = {}  # since when nothing of them was seen to run here

    def tidy(self, now: float) -> list[Run]:
        """When it is time (monotonic); those of which the memory was freed."""
        if now < self._due:
            return []
        self._due, fresh = now + EVERY_S, time.time() - FRESH_S
        old = [run for run, at in last_written(self._folder).items() if at < fresh and not run[1].startswith(ALONE)]
        unused = set(old) - running(old)
        self._unused = {run: self._unused.get(run, now) for run in unused}
        gone = sorted(run for run, since in self._unused.items() if now - since >= UNUSED_S)
        for uid, run in gone:
            sweep(run, self._folder, uid)
        return gone


def running(runs: Collection[Run]) -> set[Run]:
    """Those of which a process of their user's lives here: an agent, or something that was started by one."""
    users, found = {uid for uid, _ in runs}, set[Run]()
    for name in os.listdir(procfs.PROC) if runs else ():
        uid = procfs.owner(int(name)) if name.isdigit() else None
        if uid in users:
            words = {*procfs.environment(int(name)), *(word.encode() for word in procfs.arguments(int(name)))}
            found |= {run for run in runs if run[0] == uid and words & {run[1].encode(), f"{RUN}={run[1]}".encode()}}
    return found
