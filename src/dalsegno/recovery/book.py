"""What we remember of every node and of what we did. Pure: each change gives a new book."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from dalsegno.health import Remedy
from dalsegno.recovery.facts import NodeFault
from dalsegno.recovery.phase import HeldAction, NodePhase
from dalsegno.recovery.reason import ANYTHING, Subject

DAY_S, HOUR_S = 86400.0, 3600.0


class MarkKind(Enum):
    """What counts against a budget, or lifts it."""

    TAKEN = "taken"  # out of service
    REBOOTED = "reboot"
    REPLACED_WELL = "replaced"
    REPLACED_BADLY = "replacement failed"
    RESUMED = "resumed"  # somebody said that things may go on
    LENT = "lent"  # a spare, to a run
    RECALLED = "recalled"  # a spare that was lent, from a job that did not start on it


@dataclass(frozen=True)
class BudgetMark:
    """Something that counts against a budget."""

    kind: MarkKind
    node: str
    at: float
    key: str = ""  # of the fault
    partitions: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()  # that lost the node, or that a spare was lent to (`facts.run_of`)


@dataclass(frozen=True)
class PendingAction:
    """An action that was begun; it may have been done or not. `boot` is the node's at that time."""

    id: str
    at: float
    boot: str = ""
    how: str = ""  # of a mend: reset, reboot or replace


@dataclass(frozen=True)
class NodeBook:
    """One node. `since` is when we last turned it or acted on it: what Slurm said before counts no more."""

    node: str
    phase: NodePhase = NodePhase.IN_SERVICE
    since: float = 0.0
    entered: float = 0.0  # this phase
    seen: bool = False  # it has been in service: now it can be missed
    fault: NodeFault | None = None
    boot: str = ""  # the one that was taken out, mended or validated last
    last_boot: str = ""  # the one it was last heard of with
    steps: tuple[Remedy, ...] = ()  # tried for this fault
    evidence: bool = False
    asked: str = ""  # the order to validate itself
    asks: int = 0  # how often, since it was last mended
    pending: PendingAction | None = None
    said: str = ""  # so that it is said once
    about: Subject = ANYTHING  # of what was said
    held_back: HeldAction = HeldAction.NO  # why that is all
    excuses: tuple[str, ...] = ()  # keys of faults that someone has decided to live with, until all of it is over
    relapses: int = 0  # suspicions in a row, without a long time in service in between
    failures: int = 0  # of actions, in a row
    retry_at: float = 0.0
    held: tuple[int, ...] = ()  # jobs that it had when it was taken out
    victims: tuple[int, ...] = ()  # jobs that lost this node, until it is known what becomes of them
    left: tuple[int, ...] = ()  # jobs on it that may not be requeued
    told_at: float = 0.0  # when Slurm was last told to start one of them
    lent_to: int = 0
    closed: bool = False  # while it is lent: the job runs, and no other may start there
    validated_at: float = 0.0

    @property
    def out(self) -> bool:
        """By our hand, for a fault. A spare that is being tried has none."""
        return self.phase.out and self.fault is not None


@dataclass(frozen=True)
class Book:
    nodes: Mapping[str, NodeBook] = field(default_factory=dict)
    marks: tuple[BudgetMark, ...] = ()
    lemons: frozenset[str] = frozenset()  # GPUs that we have sent away
    paused: bool = False
    blind: bool = False  # we see no node: our own fault, as far as we can tell
    saw_at: float = 0.0  # when that was last over: what has not come by then may still come

    def of(self, node: str) -> NodeBook:
        return self.nodes.get(node) or NodeBook(node)

    def with_node(self, node: NodeBook, *marks: BudgetMark) -> Book:
        return replace(self, nodes={**self.nodes, node.node: node}, marks=(*self.marks, *marks))

    def owed(self, run: str) -> int:
        """Return how many nodes we took from a run for which it has not been lent a spare."""
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
