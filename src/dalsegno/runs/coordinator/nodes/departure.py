"""Decide when a run leaves nodes that its cloud takes away. Pure.

A run moves as soon as other nodes are ready. If there are none, it trains on until there is just enough time to save.
Then it continues with fewer nodes, if it may, or saves, releases all nodes and waits for others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from dalsegno.hostlist import compress
from dalsegno.runs.coordinator.generations.events import NodesReclaimed, NodesTaken
from dalsegno.runs.coordinator.nodes.allocation_actions import (
    Action,
    AllocationTerms,
    ApplyEvent,
    CheckAgents,
    CheckJobs,
    RunView,
    WriteJournal,
    WriteNote,
)
from dalsegno.runs.coordinator.nodes.node_rules import find_notices
from dalsegno.runs.journal import RunEvent
from dalsegno.slurm.facts import NodeInfo
from dalsegno.wire.cloud_notice import SPOT_S, CloudNotice, NoticeKind

SAVE_S = 60.0  # time before the end of a node at which the run saves at the latest
LAST_S = 10.0  # workers that have not saved this long before the end of a node are stopped
MAX_SAVE_S, MIN_SAVE_S = 120.0, 2.0  # limits on the time that workers get to save


@dataclass(frozen=True)
class Departure:
    """Nodes to leave now, and how long workers have to save. `reclaim`: the run cannot continue without them."""

    nodes: tuple[str, ...]
    save_s: float
    reclaim: bool = False


class Departures:
    """The nodes of a run that their cloud takes, known from drain reasons and from the run's own agents."""

    def __init__(self, terms: AllocationTerms) -> None:
        self._terms = terms
        self._drained: dict[str, CloudNotice] = {}
        self._told: dict[str, CloudNotice] = {}
        self._until: dict[str, float] = {}  # node -> when it is taken, by this machine's clock
        self._departing: set[str] = set()  # nodes that the run was told to leave

    @property
    def notices(self) -> Mapping[str, CloudNotice]:
        return {**self._drained, **self._told}

    @property
    def told(self) -> frozenset[str]:
        """The nodes whose agents have read a notice. Slurm may still show them in service."""
        return frozenset(self._told)

    def nodes_seen(self, nodes: Iterable[NodeInfo], now: float) -> list[Action]:
        """Take the notices in the drain reasons of all nodes, and report new ones."""
        known = self.notices
        self._drained = find_notices(nodes)
        self._update(now)
        return [action for node in self._drained if node not in known for action in self._report(node)]

    def notice_told(self, node: str, notice: CloudNotice, now: float) -> list[Action]:
        """Take a notice that an agent of the run has read on its node, and report it if it is new."""
        new = node not in self.notices
        self._told[node] = notice
        self._update(now)
        return self._report(node) if new else []

    def still_in_service(self, now: float) -> dict[str, float]:
        """Return the nodes that only agents know to be taken, and until when they are there. Slurm may use them."""
        return {node: self._until[node] for node in self._told if self._until[node] > now}

    def forget(self, nodes: Collection[str]) -> None:
        """Forget what agents read on nodes that have been replaced since."""
        self._told = {node: notice for node, notice in self._told.items() if node not in nodes}

    def _update(self, now: float) -> None:
        self._until = {node: self._until.get(node, _end_of(notice, now)) for node, notice in self.notices.items()}

    def _report(self, node: str) -> list[Action]:
        notice = self.notices[node]
        what = {"node": node, "kind": notice.kind.value, "deadline": notice.deadline}
        return [WriteJournal(RunEvent.NOTICE, what), WriteNote(f"{node}: {notice.summary}"), CheckAgents()]

    def leave(self, view: RunView) -> list[Action]:
        """Leave nodes when there are others, or when there is just time to save."""
        terms = self._terms
        self._departing &= {*view.ready}
        least = terms.min_nodes or terms.max_nodes
        due = plan_departure(self._until, view.ready, least, terms.max_nodes, view.now, terms.home)
        if due is None or self._departing.issuperset(due.nodes):
            return []
        self._departing.update(due.nodes)
        if due.reclaim:
            note = f"no other node is free for {compress(due.nodes)}: the run saves, and waits for other nodes"
            return [WriteNote(note), ApplyEvent(NodesReclaimed(due.save_s)), CheckJobs()]
        why = {node: self.notices[node].summary for node in due.nodes}
        return [ApplyEvent(NodesTaken(why, due.save_s))]


def _end_of(notice: CloudNotice, now: float) -> float:
    """Return when the node is taken. The clock of this machine may be wrong, but a spot instance never has longer."""
    return min(notice.deadline, now + SPOT_S) if notice.kind is NoticeKind.SPOT else notice.deadline


def plan_departure(
    until: Mapping[str, float], ready: Collection[str], least: int, wanted: int, now: float, home: str = ""
) -> Departure | None:
    """Return what to do now about nodes that are taken (`until`: when); None if nothing is to be done yet.

    `ready` are the nodes of the run, of which it needs `least` and wants `wanted`. `home` is the node that the
    coordinator runs on, if it runs in the job: without that node the job ends.
    """
    taken = sorted(set(until) & set(ready))
    if not taken:
        return None
    first_s = min(until[node] for node in taken) - now
    save_s = min(max(first_s - LAST_S, MIN_SAVE_S), MAX_SAVE_S)
    others = len(set(ready) - set(until))
    if others >= wanted and home not in until:
        return Departure(tuple(taken), save_s)
    if first_s > SAVE_S:
        return None
    urgent = tuple(node for node in taken if until[node] - now <= SAVE_S)
    stay = len(set(ready) - set(urgent))
    return Departure(urgent, save_s, reclaim=home in urgent or stay < max(least, 1))
