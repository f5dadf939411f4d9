"""A local cluster that is up, as those see it who work on its single nodes: the machine room and fault injection."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.errors import NotThere, TargetError
from dalsegno.hostlist import closest
from dalsegno.spec.facts import Cluster, Node
from dalsegno.system.children import Process
from dalsegno.system.hosts import host_process
from dalsegno.system.processes import Runner
from dalsegno.targets.local.cables import port_name
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import SWITCH, VIRTUAL, Placement
from dalsegno.targets.local.store import ApplyStage, read_applied, read_state


@dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster and where they are."""

    runner: Runner
    folder: Folder
    placement: Placement
    cluster: Cluster

    @property
    def virtual(self) -> bool:
        return self.placement.hosts == VIRTUAL

    def node(self, name: str) -> Node:
        """The facts of a node; NotThere for what is none."""
        known = {node.name: node for node in self.cluster.nodes}
        if name not in known:
            close = closest(name, known)
            hint = f"did you mean `{close}`? " if close else ""
            raise NotThere(f"there is no node `{name}`", hint=f"{hint}there are {', '.join(list(known)[:12])}")
        return known[name]

    def is_node(self, name: str) -> bool:
        """Of Slurm's; a head or a login host is none."""
        return any(node.name == name for node in self.cluster.nodes)

    def check_virtual(self, node: str, why: str) -> None:
        if not self.virtual:
            raise TargetError(
                f"{node} is a process on this machine, not a host: {why}",
                hint="`sudo dalsegno up` makes virtual hosts; `worker-kill` works here too",
            )

    def host(self, node: str) -> Process:
        """The first process of the node's host, which on loopback ports is everybody's."""
        host = host_process(self.folder.host(self.host_name(node)))
        if host is None:
            raise TargetError(f"{node} is off", hint="`dalsegno up` boots it")
        return host

    def host_name(self, node: str) -> str:
        return node if self.virtual else self.cluster.head

    def service(self, node: str, name: str) -> str:
        """What a service of the node is called on its host."""
        return name if self.virtual else f"{name}:{node}"

    def is_on(self, node: str) -> bool:
        return host_process(self.folder.host(self.host_name(node))) is not None

    def port(self, node: str) -> str:
        """The switch's end of the node's cable."""
        return port_name(self.placement.addresses[node])

    def switch(self) -> Process:
        switch = host_process(self.folder.host(SWITCH))
        if switch is None:
            raise TargetError("the cluster's switch host is gone", hint="run `dalsegno up`")
        return switch


def open_nodes(runner: Runner, folder: Folder, *, to_look: bool = False) -> Nodes:
    """Of a cluster that is up: one that is being changed has no nodes to work on, only to look at."""
    state, applied = read_state(folder), read_applied(folder)
    if state is None or applied is None:
        raise TargetError(f"{folder.name} is not there", hint="`dalsegno up` makes it")
    if state.phase is not ApplyStage.UP and not to_look:
        raise TargetError(f"{folder.name} is being changed", hint="try again when `dalsegno up` has ended")
    return Nodes(runner, folder, state.placement, applied)
