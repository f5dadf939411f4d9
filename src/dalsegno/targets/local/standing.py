"""What runs on a node: its services and its jobs' tasks, found from outside; and keeping a service from running."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dalsegno.system.children import Process, arguments, descendants, environment, find, start_ticks
from dalsegno.system.files import locked
from dalsegno.system.hosts import read_plan, reload, write_plan
from dalsegno.targets.local.nodes import Nodes


def hold(nodes: Nodes, node: str, names: Collection[str], held: bool) -> None:
    """Have the node's host leave these services alone, or not any more; those that it keeps stay dead meanwhile."""
    folder = nodes.folder.host(nodes.host_name(node))
    with locked(folder / "plan.lock", f"the plan of {nodes.host_name(node)}", wait_s=5.0):
        plan = read_plan(folder)
        if plan is None:
            return
        services = (replace(each, hold=held) if each.name in names else each for each in plan.services)
        write_plan(replace(plan, services=tuple(services)))
    reload(folder)


def service_processes(nodes: Nodes, node: str, names: Collection[str]) -> list[Process]:
    """By their arguments: the PIDs that a host knows are of its own namespace."""
    plan = read_plan(nodes.folder.host(nodes.host_name(node)))
    wanted = [list(each.argv) for each in plan.services if each.name in names] if plan else []
    return [process for process in _below(nodes, node) if arguments(process.pid) in wanted]


def tasks_of(nodes: Nodes, node: str) -> list[Process]:
    """The processes of jobs on the node."""
    if not nodes.virtual:  # nodes share the machine: Slurm tells its tasks which one they are on
        conf, name = f"SLURM_CONF={nodes.folder.slurm_conf}".encode(), f"SLURMD_NODENAME={node}".encode()
        return find(lambda pid: {conf, name} <= set(environment(pid)))
    return [process for process in _below(nodes, node) if _is_task(process.pid)]


def _below(nodes: Nodes, node: str) -> list[Process]:
    found = ((pid, start_ticks(pid)) for pid in descendants(nodes.host(node).pid))
    return [Process(pid, start) for pid, start in found if start is not None]


def _is_task(pid: int) -> bool:
    """slurmstepd itself is none."""
    env = environment(pid)
    stepd = " ".join(arguments(pid)).startswith("slurmstepd")
    return not stepd and any(entry.startswith(b"SLURM_JOB_ID=") for entry in env)
