"""The hosts, processes and power of a running local cluster's nodes. The machine room and fault injection act on them
from outside, as a BMC or a cloud's API does.

Callers set a node down in Slurm before they switch its power. Otherwise, if the host comes back while Slurm still has
the node in a job, Slurm ends the job.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace

from dalsegno.errors import NotThere, TargetError
from dalsegno.hostlist import closest
from dalsegno.spec.facts import Cluster, Node
from dalsegno.system.children import Process, arguments, descendants, end, environment, find, marked, start_ticks
from dalsegno.system.files import locked, write_atomic
from dalsegno.system.hosts import PACKAGES, boot, host_process, read_plan, reload, write_plan
from dalsegno.system.network import link_names, run_ip
from dalsegno.system.processes import Runner
from dalsegno.targets.folder import read_applied
from dalsegno.targets.local.folder import ApplyStage, Folder, read_state
from dalsegno.targets.local.network import plug_in, port_name, remove_cgroups_of
from dalsegno.targets.local.placement import SWITCH, VIRTUAL, Placement

NODE_SERVICES = ("slurmd", "metadata-service", "node-agent", "node-exporter")


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
            raise NotThere(f"there is no node `{name}`", hint=f"{hint}nodes: {', '.join(list(known)[:12])}")
        return known[name]

    def is_node(self, name: str) -> bool:
        """Return whether Slurm knows this name as a node; a head or login host is not a node."""
        return any(node.name == name for node in self.cluster.nodes)

    def check_virtual(self, node: str, why: str) -> None:
        if not self.virtual:
            raise TargetError(
                f"{node} is a process on this machine, not a host: {why}",
                hint="`sudo dalsegno up` creates virtual hosts; without them, use `worker-kill`",
            )

    def host(self, node: str) -> Process:
        """Return the first process of the node's host. On loopback ports, all nodes share one host."""
        host = host_process(self.folder.host(self.host_name(node)))
        if host is None:
            raise TargetError(f"{node} is off", hint="`dalsegno up` boots it")
        return host

    def host_name(self, node: str) -> str:
        return node if self.virtual else self.cluster.head

    def service(self, node: str, name: str) -> str:
        """Return the name that a service of the node has on its host."""
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


def open_nodes(runner: Runner, folder: Folder, *, read_only: bool = False) -> LocalNodes:
    """Open the nodes of a cluster. Raise an error if the cluster is being changed, unless `read_only` is set."""
    state, applied = read_state(folder), read_applied(folder)
    if state is None or applied is None:
        raise TargetError(f"there is no cluster {folder.name}", hint="`dalsegno up` creates it")
    if state.phase is not ApplyStage.UP and not read_only:
        raise TargetError(f"{folder.name} is being changed", hint="try again when `dalsegno up` has ended")
    return LocalNodes(runner, folder, state.placement, applied)


def hold(nodes: LocalNodes, node: str, names: Collection[str], held: bool) -> None:
    """Keep the node's host from starting these services; if `held` is false, let the host start them again."""
    folder = nodes.folder.host(nodes.host_name(node))
    with locked(folder / "plan.lock", f"the plan of {nodes.host_name(node)}", wait_s=5.0):
        plan = read_plan(folder)
        if plan is None:
            return
        services = (replace(each, hold=held) if each.name in names else each for each in plan.services)
        write_plan(replace(plan, services=tuple(services)))
    reload(folder)


def service_processes(nodes: LocalNodes, node: str, names: Collection[str]) -> list[Process]:
    """Return the processes of services. They are found by their arguments, because the PIDs that a host reports are
    valid only in its own namespace."""
    plan = read_plan(nodes.folder.host(nodes.host_name(node)))
    wanted = [list(each.argv) for each in plan.services if each.name in names] if plan else []
    return [process for process in _below(nodes, node) if arguments(process.pid) in wanted]


def tasks_of(nodes: LocalNodes, node: str) -> list[Process]:
    """Return the processes of jobs on the node."""
    if not nodes.virtual:  # nodes share the machine, so a task is recognized by the node's name in its environment
        conf, name = f"SLURM_CONF={nodes.folder.slurm_conf}".encode(), f"SLURMD_NODENAME={node}".encode()
        return find(lambda pid: {conf, name} <= set(environment(pid)))
    return [process for process in _below(nodes, node) if _is_task(process.pid)]


def _below(nodes: LocalNodes, node: str) -> list[Process]:
    found = ((pid, start_ticks(pid)) for pid in descendants(nodes.host(node).pid))
    return [Process(pid, start) for pid, start in found if start is not None]


def _is_task(pid: int) -> bool:
    """Return whether the process belongs to a job; slurmstepd itself does not."""
    env = environment(pid)
    stepd = " ".join(arguments(pid)).startswith("slurmstepd")
    return not stepd and any(entry.startswith(b"SLURM_JOB_ID=") for entry in env)


def pids_on(nodes: LocalNodes, node: str) -> list[int]:
    if nodes.virtual:
        return descendants(nodes.host(node).pid)
    return [process.pid for process in tasks_of(nodes, node)]


def power_off(nodes: LocalNodes, node: str) -> None:
    """Cut the node's power without warning. A node that is off stays off."""
    if nodes.virtual:
        _cut_power(nodes, node)
    else:
        _kill_all(nodes, node)


def power_on(nodes: LocalNodes, node: str) -> None:
    """Boot a node that is off, with all its services. Call it again to finish an interrupted boot."""
    if nodes.virtual:
        _boot(nodes, node)
    else:
        _start_all(nodes, node)


def _cut_power(nodes: LocalNodes, node: str) -> None:
    """Kill the node's host. Take its link down first, because the kernel would otherwise close its connections.

    After a real power cut, peers do not receive the packets that close connections.
    """
    host = host_process(nodes.folder.host(node))
    if host is None:
        return
    switch, port = nodes.switch().pid, nodes.port(node)
    if port in link_names(nodes.runner, switch):  # a host whose boot was interrupted may have no link
        run_ip(nodes.runner, [f"link set {port} down"], switch)
    if end([host]):
        raise TargetError(f"cannot stop {node}", hint="one of its processes may hang in the kernel")


def _boot(nodes: LocalNodes, node: str) -> None:
    plan = read_plan(nodes.folder.host(node))
    if plan is None:
        raise TargetError(f"{node} was never booted", hint="run `dalsegno up`")
    end(_half_booted(nodes, str(plan.path)))
    remove_cgroups_of(nodes.folder, node)
    plan = replace(plan, services=tuple(replace(service, hold=False) for service in plan.services))
    write_plan(plan)
    booted = boot(nodes.runner, [plan], str(nodes.folder.root))
    plug_in(nodes.runner, nodes.placement, nodes.switch().pid, booted, new=booted.keys())


def _half_booted(nodes: LocalNodes, plan: str) -> list[Process]:
    """Return the processes of an interrupted boot, which may still become the host.

    They are recognized by their last two arguments alone, because hosts that boot together have each other's plans
    among the other arguments.
    """
    ours = marked(str(nodes.folder.root))
    return [process for process in ours if arguments(process.pid)[-2:] == [PACKAGES, plan]]


def _kill_all(nodes: LocalNodes, node: str) -> None:
    """Kill the daemons and job tasks of a node on loopback ports. The host that runs them stays up, because all nodes
    share it."""
    names = [nodes.service(node, name) for name in NODE_SERVICES]
    hold(nodes, node, names, True)
    end([*service_processes(nodes, node, names), *tasks_of(nodes, node)])


def _start_all(nodes: LocalNodes, node: str) -> None:
    write_atomic(nodes.folder.boot_id(node), secrets.token_hex(8), durable=False)
    hold(nodes, node, [nodes.service(node, name) for name in NODE_SERVICES], False)
    reload(nodes.folder.host(nodes.host_name(node)))
