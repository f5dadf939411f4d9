"""The local target's side of fault injection, and the program `undo-fault`, which ends a fault when its time is over.

Functions import `dalsegno.inject` only if a fault is recorded or injected. So an ordinary `up` does not load it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import DalsegnoError
from dalsegno.health.result import Remedy
from dalsegno.health.telemetry import write_telemetry
from dalsegno.programs import launcher
from dalsegno.spec.facts import Node
from dalsegno.system.children import Child, Process, start
from dalsegno.system.files import read_text
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.local.daemons import daemon_env
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.nodes import LocalNodes, hold, open_nodes, pids_on, power_off, service_processes, tasks_of
from dalsegno.targets.local.placement import healthy_node

if TYPE_CHECKING:
    from dalsegno.inject.faults import InjectedFault
    from dalsegno.inject.records import FaultRecord

UNDO_TIMEOUT_S = 60.0


def has_records(folder: Folder, node: str) -> bool:
    return any(folder.faults(node).glob("*.json"))


def faults_of(folder: Folder, node: str) -> list[FaultRecord]:
    """Return the lasting faults of a node."""
    if not has_records(folder, node):
        return []
    from dalsegno.inject.records import read_records

    return read_records(folder.faults(node))


def only_in_hardware(folder: Folder, node: str) -> bool:
    """Return whether all lasting faults of a node are in its simulated hardware or in other telemetry.

    A restart of daemons does not affect such faults, so a plan that restarts daemons need not clear them.
    """
    from dalsegno.inject.injection import GPU_FAULTS
    from dalsegno.inject.records import BAD_REPLACEMENT

    return {each.fault for each in faults_of(folder, node)} <= {*GPU_FAULTS, "oom", "cloud-notice", BAD_REPLACEMENT}


def write_hardware(folder: Folder, node: Node, simulated: bool) -> None:
    """Write the telemetry of the node's hardware: that of a healthy machine, with the node's lasting faults added."""
    machine = (read_text(folder.machine(node.name)) or "").strip()
    telemetry = healthy_node(node, simulated, machine)
    if faults := faults_of(folder, node.name):
        from dalsegno.inject.hardware import with_faults

        telemetry = with_faults(telemetry, faults)
    write_telemetry(folder.telemetry(node.name), telemetry)


def clear_faults(nodes: LocalNodes, node: str, only: str | None = None) -> Sequence[InjectedFault]:
    """Undo the faults of a node, or only the fault `only`. Return those that were undone."""
    from dalsegno.inject.injection import clear

    return clear(LocalAccess(nodes), node, only)


def end_faults(nodes: LocalNodes, node: str, remedy: Remedy) -> None:
    """Delete the records of faults that this remedy ends, and write telemetry with the remaining faults."""
    if has_records(nodes.folder, node):
        from dalsegno.inject.records import end_by_remedy

        end_by_remedy(nodes.folder.faults(node), remedy)
    write_hardware(nodes.folder, nodes.node(node), nodes.placement.gpus_simulated)


def replacement_has_old_gpus(folder: Folder, node: str) -> bool:
    """Return whether an injected fault makes the next replacement have the same GPUs as the old machine."""
    if not has_records(folder, node):
        return False
    from dalsegno.inject.records import brings_old_gpus

    return brings_old_gpus(folder.faults(node))


@dataclass(frozen=True)
class LocalAccess:
    """The `NodeAccess` of a local cluster."""

    nodes: LocalNodes

    @property
    def runner(self) -> Runner:
        return self.nodes.runner

    @property
    def gpus_simulated(self) -> bool:
        return self.nodes.placement.gpus_simulated

    @property
    def cloud(self) -> str:
        return self.nodes.cluster.local.cloud if self.nodes.virtual else "none"

    @property
    def homes(self) -> Path:
        return self.nodes.folder.homes

    @property
    def munge_socket(self) -> Path:
        return self.nodes.folder.munge_socket

    def node(self, name: str) -> Node:
        return self.nodes.node(name)

    def is_node(self, name: str) -> bool:
        return self.nodes.is_node(name)

    def is_host(self, name: str) -> bool:
        return name in self.nodes.placement.addresses

    def is_on(self, node: str) -> bool:
        return self.nodes.is_on(node)

    def check_virtual(self, node: str, why: str) -> None:
        self.nodes.check_virtual(node, why)

    def host(self, node: str) -> Process:
        return self.nodes.host(node)

    def switch(self) -> Process:
        return self.nodes.switch()

    def address(self, node: str) -> str:
        return self.nodes.placement.addresses[node]

    def port(self, node: str) -> str:
        return self.nodes.port(node)

    def disk(self, node: str) -> Path:
        return self.nodes.folder.spool(node)

    def pids(self, node: str) -> list[int]:
        return pids_on(self.nodes, node)

    def tasks(self, node: str) -> list[Process]:
        return tasks_of(self.nodes, node)

    def daemons(self, node: str, daemon: str) -> list[Process]:
        return service_processes(self.nodes, node, [self.nodes.service(node, daemon)])

    def hold(self, node: str, daemon: str, held: bool) -> None:
        hold(self.nodes, node, [self.nodes.service(node, daemon)], held)

    def power_off(self, node: str) -> None:
        power_off(self.nodes, node)

    def records(self, node: str) -> Path:
        return self.nodes.folder.faults(node)

    def log(self, node: str) -> Path:
        return self.nodes.folder.log(node, "faults")

    def start(self, node: str, argv: Sequence[str]) -> Child:
        return start(argv, daemon_env(self.nodes.folder), output=self.log(node))

    def undo_at(self, record: FaultRecord, when: float) -> None:
        words = ["undo-fault", str(self.nodes.folder.root), record.node, record.mark, str(when)]
        self.start(record.node, [*launcher(), *words]).close()

    def write_hardware(self, node: str) -> None:
        write_hardware(self.nodes.folder, self.node(node), self.gpus_simulated)


def main(arguments: list[str]) -> int:
    """Run `undo-fault FOLDER NODE MARK WHEN`: undo an injected fault when its time is over."""
    from dalsegno.inject.injection import undo_when_due

    root, node, mark, when = arguments
    time.sleep(max(float(when) - time.time(), 0.0))
    until = time.monotonic() + UNDO_TIMEOUT_S
    while True:
        try:
            undo_when_due(LocalAccess(open_nodes(LocalRunner(), Folder(Path(root)))), node, mark)
            return 0
        except DalsegnoError:  # retry, because an `up` may be changing the cluster
            if time.monotonic() > until:
                raise
            time.sleep(0.2)
