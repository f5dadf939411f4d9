"""Find the workers of runs on a node, in /proc."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dalsegno.errors import NotThere
from dalsegno.system.children import PROC, Process, arguments, environment, start_ticks

RUN_NAMES = (b"DALSEGNO_RUN", b"TORCHELASTIC_RUN_ID")  # environment variables with the id of a worker's run
FORKED = re.compile(rb"ds:w(\d+)\n?")  # matches the process name of a worker that a run agent has forked


@dataclass(frozen=True)
class NodeWorker:
    """A worker of a run on a node."""

    rank: int
    pid: int
    run: str = ""  # id of the run; "" if unknown


@dataclass(frozen=True)
class SeenProcess:
    """A process on a node. `rank` is None if the process does not belong to a worker."""

    process: Process
    parent: int
    rank: int | None
    run: str = ""


def choose(seen: Iterable[SeenProcess], node: str, run: str | None, rank: int | None) -> tuple[NodeWorker, Process]:
    """Return the worker with this run and rank, and its process. None matches any run or rank; the lowest rank that
    matches is returned. Pure."""
    workers = find_workers(seen)
    for worker, process in workers.items():
        if run in (None, worker.run) and rank in (None, worker.rank):
            return worker, process
    there = ", ".join(f"rank {one.rank}" + (f" of {one.run}" if one.run else "") for one in workers)
    which = (f"of rank {rank} " if rank is not None else "") + (f"of run {run} " if run else "")
    raise NotThere(
        f"there is no worker {which}on {node}", hint=f"there is {there}" if there else "no run has workers there"
    )


def find_workers(seen: Iterable[SeenProcess]) -> dict[NodeWorker, Process]:
    """Return the workers in the order of their ranks. A worker's children, such as data loaders, are left out."""
    marked = {one.process.pid: one for one in seen if one.rank is not None}
    workers = [
        (NodeWorker(one.rank, one.process.pid, one.run), one.process)
        for one in marked.values()
        if one.rank is not None and not (one.parent in marked and marked[one.parent].rank == one.rank)
    ]
    return dict(sorted(workers, key=lambda found: (found[0].rank, found[1].start)))


def inspect(pid: int) -> SeenProcess | None:
    """Return a process with its parent, rank and run; None if the process has ended or cannot be read."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    with contextlib.suppress(OSError):
        name = (PROC / str(pid) / "comm").read_bytes()
        env = dict(entry.partition(b"=")[::2] for entry in environment(pid))
        return SeenProcess(Process(pid, ticks), _parent(pid), rank_of(name, env), _run_of(pid, env))
    return None


def rank_of(name: bytes, env: dict[bytes, bytes]) -> int | None:
    """Return the rank of a process; None if it is not a worker. A worker that a run agent forked has the rank in its
    process name, any other worker in its environment."""
    named = FORKED.fullmatch(name)
    if named:
        return int(named[1])
    rank = env.get(b"RANK", b"") if any(name in env for name in RUN_NAMES) else b""
    return int(rank) if rank.isdigit() else None


def _run_of(pid: int, env: dict[bytes, bytes]) -> str:
    """Return the id of a process's run, from its environment or the arguments of its run agent; "" if unknown."""
    named = [env[name] for name in RUN_NAMES if name in env]
    if named:
        return named[0].decode(errors="replace")
    with contextlib.suppress(OSError, ValueError):
        while pid > 1:
            *_, program, run = ["", "", *arguments(pid)]
            if program == "run-agent":
                return run
            pid = _parent(pid)
    return ""


def _parent(pid: int) -> int:
    return int((PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
