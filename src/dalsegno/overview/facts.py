"""The facts about a cluster at one moment: Slurm's view, the controller's view, the runs and the last events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dalsegno.health.messages import GpuReading
from dalsegno.health.result import Remedy
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.slurm.facts import NodeInfo, parse_node_state
from dalsegno.targets.base import ClusterStatus, NodeStatus

if TYPE_CHECKING:
    from dalsegno.recovery.journal.event import Event
    from dalsegno.runs.coordinator.reports.goodput import TrainingProgress
    from dalsegno.runs.status import RunStatus

SLURM_USERS = frozenset({"root", "slurm"})


@dataclass(frozen=True)
class NodeRecovery:
    """The controller's record of one node."""

    node: str
    phase: NodePhase = NodePhase.IN_SERVICE
    since: float | None = None
    reason: str = ""  # why the node is out of service or suspected; "" if it has no fault
    note: str = ""
    tried: tuple[Remedy, ...] = ()  # remedies that were tried; in the phase REPAIRING, the last one is under way
    held_back: HeldAction = HeldAction.NO


@dataclass(frozen=True)
class RecoveryView:
    """The controller's view of recovery. `nodes` maps node names to records."""

    nodes: Mapping[str, NodeRecovery] = field(default_factory=dict)
    paused: bool = False
    slurm_users: frozenset[str] = SLURM_USERS  # a drain reason set by one of these users comes from Slurm itself


@dataclass(frozen=True)
class ObservedRun:
    """A run, its progress if the script reports steps, and whether its coordinator is dead or silent."""

    status: RunStatus
    progress: TrainingProgress | None = None
    silent: bool = False


@dataclass(frozen=True)
class FailingScrape:
    """A host that Prometheus cannot read, and the job of Prometheus that reads it."""

    job: str
    host: str


@dataclass(frozen=True)
class Overview:
    """The facts about a cluster, as far as they are known. `controller` is None if no controller answers."""

    status: ClusterStatus
    controller: RecoveryView | None = None
    has_controller: bool = True  # False for a cluster that Dal Segno did not create
    runs: tuple[ObservedRun, ...] = ()
    all_runs: bool = True  # False if only the runs of this user are known
    events: tuple[Event, ...] = ()  # the last events, oldest first
    gpus: Mapping[str, tuple[GpuReading, ...]] = field(default_factory=dict)  # readings by node, of connected agents
    # exporters that Prometheus cannot read; empty if there is no Prometheus
    failing_scrapes: tuple[FailingScrape, ...] = ()

    @property
    def slurm_answers(self) -> bool:
        return self.status.jobs is not None


def read_controller(nodes: Mapping[str, Any], automation: Mapping[str, Any]) -> RecoveryView:
    """Parse the controller's answers to `nodes` and `automation`. Controllers of other versions may omit fields."""
    found = [read_node(each) for each in nodes.get("nodes", ())]
    return RecoveryView(
        nodes={each.node: each for each in found},
        paused=automation.get("automation") == "paused",
        slurm_users=frozenset(map(str, nodes.get("slurm_users", SLURM_USERS))),
    )


def read_node(message: Mapping[str, Any]) -> NodeRecovery:
    """Parse the controller's record of one node."""
    since = message.get("since")
    return NodeRecovery(
        node=str(message["node"]),
        phase=NodePhase.parse(message["phase"]),
        since=float(since) if isinstance(since, (int, float)) else None,
        reason=str(message.get("reason") or ""),
        note=str(message.get("note") or ""),
        tried=tuple(each for word in message.get("tried", ()) for each in Remedy if each.value == word),
        held_back=HeldAction.of(message.get("held_back")),
    )


def info_of(node: NodeStatus) -> NodeInfo:
    """Return Slurm's view of a node, from sinfo's word for its state."""
    state, flags = parse_node_state(node.state)
    return NodeInfo(node.name, state, flags, reason=node.reason, reason_user=node.reason_user)
