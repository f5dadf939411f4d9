"""The workers of runs on a node, and killing one on purpose."""

from __future__ import annotations

import signal

from dalsegno.system.children import Process, descendants, send
from dalsegno.targets.base import Worker
from dalsegno.targets.local.nodes import Nodes
from dalsegno.targets.local.standing import tasks_of
from dalsegno.targets.workers import choose, see


def kill_worker(nodes: Nodes, node: str, run: str | None, rank: int | None) -> Worker:
    """Without a word, as a kernel that is out of memory does it."""
    worker, process = find_worker(nodes, node, run, rank)
    send(process, signal.SIGKILL)
    return worker


def find_worker(nodes: Nodes, node: str, run: str | None, rank: int | None) -> tuple[Worker, Process]:
    """The one of this run and rank, where they are named, else of the lowest rank."""
    seen = [see(pid) for pid in _pids_on(nodes, node)]
    return choose([one for one in seen if one is not None], node, run, rank)


def _pids_on(nodes: Nodes, node: str) -> list[int]:
    if nodes.virtual:
        return descendants(nodes.host(node).pid)
    return [process.pid for process in tasks_of(nodes, node)]
