"""Faults of a node's processes: dead daemons, stopped or killed workers, memory that runs out."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.inject.access import NodeAccess
from dalsegno.inject.records import FaultRecord
from dalsegno.inject.workers import NodeWorker, choose, inspect
from dalsegno.system.children import PROC, Process, end, send

DAEMONS = {"slurmd-dead": "slurmd", "agent-dead": "node-agent"}


def kill_daemon(nodes: NodeAccess, fault: FaultRecord) -> None:
    """Tell its host first not to restart it."""
    nodes.hold(fault.node, DAEMONS[fault.fault], True)
    end(nodes.daemons(fault.node, DAEMONS[fault.fault]))


def start_daemon(nodes: NodeAccess, fault: FaultRecord) -> None:
    nodes.hold(fault.node, DAEMONS[fault.fault], False)


def stop_worker(nodes: NodeAccess, fault: FaultRecord) -> None:
    send(_process(fault), signal.SIGSTOP)


def resume_worker(nodes: NodeAccess, fault: FaultRecord) -> None:
    send(_process(fault), signal.SIGCONT)


def _process(fault: FaultRecord) -> Process:
    return Process(int(fault.undo["pid"]), int(fault.undo["start"]))


def kill_worker(nodes: NodeAccess, node: str, run: str | None, rank: int | None) -> NodeWorker:
    """Kill a worker without warning, as a kernel that is out of memory does."""
    worker, process = find_worker(nodes, node, run, rank)
    send(process, signal.SIGKILL)
    return worker


def find_worker(nodes: NodeAccess, node: str, run: str | None, rank: int | None) -> tuple[NodeWorker, Process]:
    """Return the worker of this run and rank, if they are given, else the one of the lowest rank."""
    seen = [inspect(pid) for pid in nodes.pids(node)]
    return choose([one for one in seen if one is not None], node, run, rank)


def largest_task(nodes: NodeAccess, node: str) -> dict[str, Any]:
    """Return PID, start, name and size of what the kernel would kill; nothing if no job runs."""
    sizes = {process: _resident_kib(process.pid) for process in nodes.tasks(node)}
    if not sizes:
        return {}
    process = max(sizes, key=lambda one: sizes[one])
    name = (PROC / str(process.pid) / "comm").read_text(errors="replace").strip()
    return {"pid": process.pid, "start": process.start, "name": name, "kib": sizes[process]}


def run_out_of_memory(nodes: NodeAccess, fault: FaultRecord) -> None:
    if fault.undo:
        send(_process(fault), signal.SIGKILL)


def _resident_kib(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * 4
    return 0


def check_runs(nodes: NodeAccess, node: str, name: str) -> None:
    if not nodes.daemons(node, name):
        raise TargetError(f"{name} does not run on {node}", hint="`dalsegno status` shows the daemons")
