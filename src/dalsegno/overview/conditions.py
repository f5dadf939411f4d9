"""The condition of each node, from Slurm's state and the controller's phase, and of each run. Pure."""

from __future__ import annotations

from enum import Enum

from dalsegno.health.result import Remedy
from dalsegno.overview.facts import NodeRecovery, ObservedRun, Overview, RecoveryView, info_of
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.reason import Owner, find_owner
from dalsegno.runs.status import RunPhase
from dalsegno.slurm.facts import NodeState
from dalsegno.targets.base import NodeStatus
from dalsegno.wire.cloud_notice import find_notice


class NodeCondition(Enum):
    """The condition of a node. The most urgent condition is first."""

    NEEDS_ADMIN = "needs-admin"  # an administrator must repair the node
    HELD_BACK = "held-back"  # the node has a fault, but recovery is paused, only observing, or at a limit
    OFF = "off"  # the host is off, and the controller has not acted yet
    OUT = "out"  # the node is down or drained in Slurm, and the controller has not acted yet
    NOT_RESPONDING = "not-responding"  # slurmctld gets no answer from the node's slurmd
    UNKNOWN = "unknown"  # slurmctld does not know the node
    TAKEN = "taken"  # the cloud provider ends the instance of the node
    DOWN = "down"
    DRAINED = "drained"
    REPAIRING = "repairing"  # by the controller or the platform
    RESETTING = "resetting"
    REBOOTING = "rebooting"
    REPLACING = "replacing"
    VALIDATING = "validating"
    LEFT_ALONE = "left-alone"  # an administrator took the node out of service
    SUSPECTED = "suspected"  # the node may have a fault, but is still in service
    IN_SERVICE = "in-service"
    LENT = "lent"
    SPARE = "spare"

    @property
    def healthy(self) -> bool:
        return self in (NodeCondition.IN_SERVICE, NodeCondition.LENT, NodeCondition.SPARE)


class RunImpact(Enum):
    """The condition of a run. The most urgent condition is first."""

    NO_COORDINATOR = "no-coordinator"  # the coordinator is dead, or has been silent for too long
    RESTARTING = "restarting"
    WAITING = "waiting"  # the run has trained before, and waits for nodes
    SMALLER = "smaller"  # the run trains on fewer nodes than requested
    QUEUED = "queued"  # the run has not started yet
    UNAFFECTED = "unaffected"


_REPAIRS = {
    Remedy.RESET: NodeCondition.RESETTING,
    Remedy.REBOOT: NodeCondition.REBOOTING,
    Remedy.REPLACE: NodeCondition.REPLACING,
}
_OUT_PHASES = {
    NodePhase.DRAINED: NodeCondition.DRAINED,
    NodePhase.DOWN: NodeCondition.DOWN,
    NodePhase.VALIDATING: NodeCondition.VALIDATING,
}
_SPARES = {NodePhase.SPARE: NodeCondition.SPARE, NodePhase.LENT: NodeCondition.LENT}


def node_conditions(overview: Overview) -> dict[str, NodeCondition]:
    """Return the condition of every node. While Slurm does not answer, ignore the last states that it reported."""
    view = overview.controller or RecoveryView()
    return {
        node.name: node_condition(node, view.nodes.get(node.name), view.slurm_users, overview.slurm_answers)
        for node in overview.status.nodes
    }


def node_condition(
    node: NodeStatus, record: NodeRecovery | None, slurm_users: frozenset[str], slurm_answers: bool = True
) -> NodeCondition:
    if record and (out := _out_condition(record)):
        return out
    if node.off:
        return NodeCondition.OFF
    if record and record.phase in _SPARES:
        return _SPARES[record.phase]
    if node.spare and record and record.phase is NodePhase.VALIDATING:
        return NodeCondition.SPARE  # the node has no fault: spares are validated at intervals
    found = _slurm_condition(node, slurm_users) if slurm_answers else NodeCondition.IN_SERVICE
    suspected = record is not None and record.phase is NodePhase.SUSPECTED
    return NodeCondition.SUSPECTED if suspected and found is NodeCondition.IN_SERVICE else found


def _out_condition(record: NodeRecovery) -> NodeCondition | None:
    """Return the condition of a node that the controller keeps out of service, or would take out; None for other
    nodes."""
    if record.phase is NodePhase.NEEDS_ADMIN:
        return NodeCondition.NEEDS_ADMIN
    if is_held_back(record):
        return NodeCondition.HELD_BACK
    if record.phase is NodePhase.REPAIRING:
        return _REPAIRS.get(record.tried[-1], NodeCondition.REPAIRING) if record.tried else NodeCondition.REPAIRING
    if record.phase in (NodePhase.DRAINED, NodePhase.DOWN) and find_notice(record.reason):
        return NodeCondition.TAKEN
    return _OUT_PHASES.get(record.phase) if record.reason else None


def is_held_back(record: NodeRecovery) -> bool:
    """Return whether a node has a fault that the controller may not act on now."""
    faulty = record.phase is NodePhase.SUSPECTED or (record.phase.out and bool(record.reason))
    return faulty and record.held_back is not HeldAction.NO


def _slurm_condition(node: NodeStatus, slurm_users: frozenset[str]) -> NodeCondition:
    info = info_of(node)
    owner = find_owner(info, slurm_users)
    if owner is Owner.SPARE:
        return NodeCondition.SPARE
    if owner is Owner.SOMEONE:
        return NodeCondition.LEFT_ALONE
    if owner is Owner.PLATFORM:
        return NodeCondition.REPAIRING
    if info.draining or info.down:
        return NodeCondition.OUT
    if not info.responding:
        return NodeCondition.NOT_RESPONDING
    return NodeCondition.UNKNOWN if info.state is NodeState.UNKNOWN else NodeCondition.IN_SERVICE


def run_impact(run: ObservedRun) -> RunImpact | None:
    """Return the condition of a run; None if the run is ending or over."""
    status = run.status
    if status.phase in (RunPhase.ENDING, RunPhase.ENDED):
        return None
    if run.silent:
        return RunImpact.NO_COORDINATOR
    if status.phase is RunPhase.WAITING:
        return RunImpact.WAITING if status.started else RunImpact.QUEUED
    if status.phase in (RunPhase.STOPPING, RunPhase.RESTARTING) and status.started:
        return RunImpact.RESTARTING
    smaller = status.phase is RunPhase.RUNNING and 0 < status.group_size < status.wanted_nodes
    return RunImpact.SMALLER if smaller else RunImpact.UNAFFECTED
