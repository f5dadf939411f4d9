"""The nodes of a local cluster that is up, for the machine room and fault injection."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from dalsegno.errors import NotThere, TargetError
from dalsegno.hostlist import closest
from dalsegno.spec.facts import Cluster, Node
from dalsegno.system.children import Process, arguments, descendants, environment, find, start_ticks
from dalsegno.system.files import locked
from dalsegno.system.hosts import host_process, read_plan, reload, write_plan
from dalsegno.system.processes import Runner
from dalsegno.targets.folder import read_applied
from dalsegno.targets.local.folder import ApplyStage, Folder, read_state
from dalsegno.targets.local.network import port_name
from dalsegno.targets.local.placement import SWITCH, VIRTUAL, Placement


@dataclass(frozen=True)
class LocalNodes:
    """The nodes of a cluster and their placement."""

    runner: Runner
    folder: Folder
    placement: Placement
    cluster: Cluster

    @property
    def virtual(self) -> bool:
        return self.placement.hosts == VIRTUAL

    def node(self, name: str) -> Node:
        """Return the facts of a node; raise NotThere for an unknown name."""
        known = {node.name: node for node in self.cluster.nodes}
        if name not in known:
            close = closest(name, known)
            hint = f"did you mean `{close}`? " if close else ""
            raise NotThere(f"there is no node `{name}`", hint=f"{hint}there are {', '.join(list(known)[:12])}")
        return known[name]

    def is_node(self, name: str) -> bool:
        """Return whether Slurm knows it as a node; a head or a login host is none."""
        return any(node.name == name for node in self.cluster.nodes)

    def check_virtual(self, node: str, why: str) -> None:
        if not self.virtual:
            raise TargetError(
                f"{node} is a process on this machine, not a host: {why}",
                hint="`sudo dalsegno up` makes virtual hosts; `worker-kill` works here too",
            )

    def host(self, node: str) -> Process:
        """Return the first process of the node's host; on loopback ports all nodes share one."""
        host = host_process(self.folder.host(self.host_name(node)))
        if host is None:
            raise TargetError(f"{node} is off", hint="`dalsegno up` boots it")
        return host

    def host_name(self, node: str) -> str:
        return node if self.virtual else self.cluster.head

    def service(self, node: str, name: str) -> str:
        """Return the name of a service of the node on its host."""
        return name if self.virtual else f"{name}:{node}"

    def is_on(self, node: str) -> bool:
        return host_process(self.folder.host(self.host_name(node))) is not None

    def port(self, node: str) -> str:
        """Return the name of the switch's end of the node's link."""
        return port_name(self.placement.addresses[node])

    def switch(self) -> Process:
        switch = host_process(self.folder.host(SWITCH))
        if switch is None:
            raise TargetError("the cluster's switch host is gone", hint="run `dalsegno up`")
        return switch


def open_nodes(runner: Runner, folder: Folder, *, to_look: bool = False) -> LocalNodes:
    """Open the nodes of a cluster. While it is being changed, they can only be looked at (`to_look`)."""
    state, applied = read_state(folder), read_applied(folder)
    if state is None or applied is None:
        raise TargetError(f"{folder.name} is not there", hint="`dalsegno up` makes it")
    if state.phase is not ApplyStage.UP and not to_look:
        raise TargetError(f"{folder.name} is being changed", hint="try again when `dalsegno up` has ended")
    return LocalNodes(runner, folder, state.placement, applied)


def hold(nodes: LocalNodes, node: str, names: Collection[str], held: bool) -> None:
    """Keep the node's host from starting these services, or let it start them again."""
    folder = nodes.folder.host(nodes.host_name(node))
    with locked(folder / "plan.lock", f"the plan of {nodes.host_name(node)}", wait_s=5.0):
        plan = read_plan(folder)
        if plan is None:
            return
        services = (replace(each, hold=held) if each.name in names else each for each in plan.services)
        write_plan(replace(plan, services=tuple(services)))
    reload(folder)


def service_processes(nodes: LocalNodes, node: str, names: Collection[str]) -> list[Process]:
    """Return the processes of services, found by their arguments: a host knows only PIDs of its own namespace."""
    plan = read_plan(nodes.folder.host(nodes.host_name(node)))
    wanted = [list(each.argv) for each in plan.services if each.name in names] if plan else []
    return [process for process in _below(nodes, node) if arguments(process.pid) in wanted]


def tasks_of(nodes: LocalNodes, node: str) -> list[Process]:
    """Return the processes of jobs on the node."""
    if not nodes.virtual:  # nodes share the machine: tasks have the name of theirs in their environment
        conf, name = f"SLURM_CONF={nodes.folder.slurm_conf}".encode(), f"SLURMD_NODENAME={node}".encode()
        return find(lambda pid: {conf, name} <= set(environment(pid)))
    return [process for process in _below(nodes, node) if _is_task(process.pid)]


def _below(nodes: LocalNodes, node: str) -> list[Process]:
    found = ((pid, start_ticks(pid)) for pid in descendants(nodes.host(node).pid))
    return [Process(pid, start) for pid, start in found if start is not None]


def _is_task(pid: int) -> bool:
    """Return whether it belongs to a job; slurmstepd itself does not."""
    env = environment(pid)
    stepd = " ".join(arguments(pid)).startswith("slurmstepd")
    return not stepd and any(entry.startswith(b"SLURM_JOB_ID=") for entry in env)


def pids_on(nodes: LocalNodes, node: str) -> list[int]:
    if nodes.virtual:
        return descendants(nodes.host(node).pid)
    return [process.pid for process in tasks_of(nodes, node)]
