"""The controller's records of nodes and past actions. Pure: each change returns new records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.reason import ANYTHING, Subject

DAY_S, HOUR_S = 86400.0, 3600.0


class MarkKind(Enum):
    """The kind of event that a `BudgetMark` records."""

    TAKEN = "taken"  # a node was taken out of service
    REBOOTED = "reboot"
    REPLACED_WELL = "replaced"
    REPLACED_BADLY = "replacement failed"
    RESUMED = "resumed"  # an administrator resumed automatic recovery
    LENT = "lent"  # a spare was lent to a run
    RECALLED = "recalled"  # a lent spare was taken back from a job that did not start on it


@dataclass(frozen=True)
class BudgetMark:
    """An event that counts against a budget or resets it."""

    kind: MarkKind
    node: str
    at: float
    key: str = ""  # key of the fault
    partitions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()  # runs that lost the node, or the run that a spare was lent to (`Facts.run_of`)


@dataclass(frozen=True)
class PendingAction:
    """An action that was begun and has no recorded outcome yet. `boot` is the node's boot id before a repair."""

    id: str
    at: float
    boot: str = ""
    how: str = ""  # the remedy if the action is a repair: reset, reboot or replace


@dataclass(frozen=True)
class NodeRecord:
    """The record of one node. `since` is the time of its last change or action; answers that Slurm gave earlier are
    ignored."""

    node: str
    phase: NodePhase = NodePhase.IN_SERVICE
    since: float = 0.0
    entered: float = 0.0  # when the node entered this phase
    seen: bool = False  # whether the node was ever in service or its agent connected; only then is its absence a fault
    fault: NodeFault | None = None
    boot: str = ""  # the node's boot id when it was last taken out, repaired or validated
    last_boot: str = ""  # the node's boot id when its agent was last connected
    steps: tuple[Remedy, ...] = ()  # remedies tried for this fault
    evidence: bool = False
    asked: str = ""  # id of the last validation
    asks: int = 0  # number of validation orders since the last repair
    pending: PendingAction | None = None
    said: str = ""  # the last remark
    about: Subject = ANYTHING  # subject of the last remark, so that it is not repeated
    held_back: HeldAction = HeldAction.NO  # why the announced action is not carried out
    excuses: tuple[str, ...] = ()  # keys of faults that an administrator has accepted, until all of them are over
    relapses: int = 0  # number of suspicions in a row, without a long time in service in between
    failures: int = 0  # number of failed actions in a row
    retry_at: float = 0.0
    held: tuple[int, ...] = ()  # jobs on the node when it was taken out
    victims: tuple[int, ...] = ()  # jobs that lost this node and have neither restarted nor ended yet
    left: tuple[int, ...] = ()  # jobs on the node that could not be requeued; this is not tried again
    told_at: float = 0.0  # when the start delay of a victim was last removed
    lent_to: int = 0  # the job to which this spare is lent
    closed: bool = False  # whether this lent spare is closed to all other jobs
    stands_for: str = ""  # the node that this spare replaces in service
    validated_at: float = 0.0

    @property
    def out(self) -> bool:
        """Return whether the controller keeps the node out of service for a fault. A spare under validation has no
        fault."""
        return self.phase.out and self.fault is not None

    @property
    def counts(self) -> bool:
        """Return whether the node counts against the limits on repairs.

        A node that waits for a file server does not count, because it is not repaired.
        """
        return self.out and not self.waits_for_server

    @property
    def waits_for_server(self) -> bool:
        return self.out and self.fault is not None and self.fault.server_away


@dataclass(frozen=True)
class NodeRecords:
    nodes: Mapping[str, NodeRecord] = field(default_factory=dict)
    marks: tuple[BudgetMark, ...] = ()
    replaced_gpus: frozenset[str] = frozenset()  # ids of the GPUs of machines that were replaced
    paused: bool = False
    blind: bool = False  # whether nearly all nodes are silent, most likely because of the controller's own network
    saw_at: float = 0.0  # when `blind` last ended

    def get(self, node: str) -> NodeRecord:
        return self.nodes.get(node) or NodeRecord(node)

    def with_node(self, node: NodeRecord, *marks: BudgetMark) -> NodeRecords:
        return replace(self, nodes={**self.nodes, node.node: node}, marks=(*self.marks, *marks))

    def owed(self, run: str) -> int:
        """Return how many nodes a run has lost without being lent a spare for them."""
        of_run = [mark.kind for mark in self.marks if run in mark.runs]
        return of_run.count(MarkKind.TAKEN) + of_run.count(MarkKind.RECALLED) - of_run.count(MarkKind.LENT)

    def count(self, kind: MarkKind, since: float, *, node: str = "", key: str = "", partition: str = "") -> int:
        return sum(
            mark.kind is kind
            and mark.at > since
            and node in ("", mark.node)
            and key in ("", mark.key)
            and (not partition or partition in mark.partitions)
            for mark in self.marks
        )
