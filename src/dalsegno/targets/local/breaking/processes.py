"""Processes of a node: daemons that die, workers that hang or are killed, memory that runs out."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.system.children import PROC, Process, end, send
from dalsegno.targets.local.breaking.records import Injected
from dalsegno.targets.local.nodes import LocalNodes, hold, service_processes, tasks_of

DAEMONS = {"slurmd-dead": "slurmd", "agent-dead": "node-agent"}


def kill_daemon(nodes: LocalNodes, fault: Injected) -> None:
    """Its host is told first to leave it dead."""
    names = [nodes.service(fault.node, DAEMONS[fault.fault])]
    hold(nodes, fault.node, names, True)
    end(service_processes(nodes, fault.node, names))


def start_daemon(nodes: LocalNodes, fault: Injected) -> None:
    hold(nodes, fault.node, [nodes.service(fault.node, DAEMONS[fault.fault])], False)


def stop_worker(nodes: LocalNodes, fault: Injected) -> None:
    send(_process(fault), signal.SIGSTOP)


def let_worker_go_on(nodes: LocalNodes, fault: Injected) -> None:
    send(_process(fault), signal.SIGCONT)


def _process(fault: Injected) -> Process:
    return Process(int(fault.undo["pid"]), int(fault.undo["start"]))


def largest_task(nodes: LocalNodes, node: str) -> dict[str, Any]:
    """What the kernel would kill: its PID, start, name and size; nothing where no job runs."""
    sizes = {process: _resident_kib(process.pid) for process in tasks_of(nodes, node)}
    if not sizes:
        return {}
    process = max(sizes, key=lambda one: sizes[one])
    name = (PROC / str(process.pid) / "comm").read_text(errors="replace").strip()
    return {"pid": process.pid, "start": process.start, "name": name, "kib": sizes[process]}


def run_out_of_memory(nodes: LocalNodes, fault: Injected) -> None:
    if fault.undo:
        send(_process(fault), signal.SIGKILL)


def _resident_kib(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * 4
    return 0


def check_runs(nodes: LocalNodes, node: str, name: str) -> None:
    if not service_processes(nodes, node, [nodes.service(node, name)]):
        raise TargetError(f"{name} does not run on {node}", hint="`dalsegno status` shows the daemons")
