"""The access to nodes that fault injection needs, and functions that run commands in namespaces of a node or switch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dalsegno.spec.facts import Node
from dalsegno.system.children import Child, Process
from dalsegno.system.processes import Completed, Runner

if TYPE_CHECKING:
    from dalsegno.inject.records import FaultRecord


class NodeAccess(Protocol):
    """Access to a cluster's nodes from outside. A target implements it for its own hosts."""

    @property
    def runner(self) -> Runner: ...

    @property
    def gpus_simulated(self) -> bool: ...

    @property
    def cloud(self) -> str:
        """The cloud that the nodes appear to be on, such as "ec2"; "none" if they appear to be on no cloud."""
        ...

    @property
    def homes(self) -> Path:
        """The folder of home folders, which all nodes share."""
        ...

    @property
    def munge_socket(self) -> Path: ...

    def node(self, name: str) -> Node:
        """Return the facts of a node; raise NotThere for an unknown name."""
        ...

    def is_node(self, name: str) -> bool:
        """Return whether Slurm knows this name as a node; a head or login host is not a node."""
        ...

    def is_host(self, name: str) -> bool:
        """Return whether the name is a host of the cluster: a node, the head or a login host."""
        ...

    def is_on(self, node: str) -> bool: ...

    def check_virtual(self, node: str, why: str) -> None:
        """Raise TargetError with the reason `why` unless the node is a virtual host."""
        ...

    def host(self, node: str) -> Process:
        """Return the first process of the node's host."""
        ...

    def switch(self) -> Process:
        """Return the first process of the virtual switch that connects all nodes."""
        ...

    def address(self, node: str) -> str:
        """Return the IPv4 address of the node."""
        ...

    def port(self, node: str) -> str:
        """Return the name of the switch's network interface for this node."""
        ...

    def disk(self, node: str) -> Path:
        """Return the folder where the node's own disk is mounted."""
        ...

    def pids(self, node: str) -> list[int]:
        """Return the PIDs of the node's processes in this machine's PID namespace."""
        ...

    def tasks(self, node: str) -> list[Process]:
        """Return the processes of Slurm jobs on the node."""
        ...

    def daemons(self, node: str, daemon: str) -> list[Process]:
        """Return the processes of one daemon of the node."""
        ...

    def hold(self, node: str, daemon: str, held: bool) -> None:
        """Stop the node's host from restarting a daemon; if `held` is false, let the host restart it again."""
        ...

    def power_off(self, node: str) -> None: ...

    def records(self, node: str) -> Path:
        """Return the folder with the records of the node's faults."""
        ...

    def log(self, node: str) -> Path: ...

    def start(self, node: str, argv: Sequence[str]) -> Child:
        """Start a process that outlives this one, with its output in the log of the node's faults."""
        ...

    def undo_at(self, record: FaultRecord, when: float) -> None:
        """Make sure that a fault is undone at that time, even if this process has ended by then."""
        ...

    def write_hardware(self, node: str) -> None:
        """Write the telemetry of the node's simulated hardware, including its recorded faults."""
        ...


def in_mounts(nodes: NodeAccess, node: str, argv: Sequence[str]) -> Completed:
    """Run a command in the node's mount and PID namespaces. umount needs the PID namespace to read /proc/self."""
    return nodes.runner.run(["nsenter", "-t", str(nodes.host(node).pid), "-m", "-p", "--", *argv], timeout_s=30)


def in_switch(nodes: NodeAccess, argv: Sequence[str]) -> Completed:
    return nodes.runner.run(["nsenter", "-t", str(nodes.switch().pid), "-n", "--", *argv], timeout_s=30)


def in_network(nodes: NodeAccess, node: str, argv: Sequence[str]) -> Completed:
    return nodes.runner.run(["nsenter", "-t", str(nodes.host(node).pid), "-n", "--", *argv], timeout_s=30)
