"""What a run left in this node's shared memory when it had lost the node: swept once nobody is left who could use it.

The names of the files are the users'. All that is done here takes time in proportion to files and processes, never to
one times the other: a user with many of both must not keep the memory of the others from being swept.

A run sweeps the nodes that it has when it ends. One that it was cut off from, and gave back, it cannot reach any more;
Slurm has ended its agent there without a word. Snapshots outlive their agent on purpose, so there is a time of grace.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from dalsegno.system import procfs
from dalsegno.train.contract import RUN
from dalsegno.train.memory.files import ALONE, SHM, every_folder, last_written, run_of, sweep_all

EVERY_S = 10.0
FRESH_S = 10.0  # what was written a moment ago is in use: then no process is looked at
UNUSED_S = 30.0  # longer than a run needs to start another agent

Run = tuple[int, str]  # whose, and its id
_FILES = re.compile(rb"/dalsegno\.[0-9.]+/([^/\n]+)")


class MemoryOfRuns:
    """Of every user's, where we are root; else of our own."""

    def __init__(self, folder: Path = SHM, uid: int | None = None) -> None:
        self._folder, self._due = folder, float("-inf")
        self._uid = os.geteuid() if uid is None else uid
        self._unused: dict[Run, float] = {}  # since when nothing of them was seen to run here

    def tidy(self, now: float) -> list[Run]:
        """When it is time (monotonic); those of which the memory was freed."""
        if now < self._due:
            return []
        self._due, fresh = now + EVERY_S, time.time() - FRESH_S
        folders = [(uid, path) for uid, path in every_folder(self._folder) if self._uid in (0, uid)]
        written = [((uid, run), at) for uid, path in folders for run, at in last_written(path, uid).items()]
        old = [run for run, at in written if at < fresh and not run[1].startswith(ALONE)]
        unused = set(old) - running(old)
        self._unused = {run: self._unused.get(run, now) for run in unused}
        due = {run for run, since in self._unused.items() if now - since >= UNUSED_S}
        gone = due - mapped(due)
        for owner, path in folders:
            if own := {run for uid, run in gone if uid == owner}:
                sweep_all(own, path, owner)
        return sorted(gone)


def running(runs: Collection[Run]) -> set[Run]:
    """Those of which a process of their user's lives here: an agent, or something that was started by one."""
    marks = {(uid, word.encode()): (uid, run) for uid, run in runs for word in (run, f"{RUN}={run}")}
    found = set[Run]()
    for uid, pid in _processes({uid for uid, _ in runs}):
        words = [*procfs.environment(pid), *(word.encode() for word in procfs.arguments(pid))]
        found |= {marks[uid, word] for word in words if (uid, word) in marks}
    return found


def mapped(runs: Collection[Run]) -> set[Run]:
    """Those of which a process has a file open that bears no mark of the run. Asked before the last step."""
    found = set[Run]()
    for uid, pid in _processes({uid for uid, _ in runs}):
        names = {name.decode(errors="replace") for name in _FILES.findall(procfs.mapped(pid))}
        found |= {(uid, run) for name in names if (run := run_of(name.removesuffix(" (deleted)")))}
    return found & set(runs)


def _processes(users: Collection[int]) -> Iterator[tuple[int, int]]:
    """Of these users: whose, and its id."""
    for name in os.listdir(procfs.PROC) if users else ():
        uid = procfs.owner(int(name)) if name.isdigit() else None
        if uid is not None and uid in users:
            yield uid, int(name)
