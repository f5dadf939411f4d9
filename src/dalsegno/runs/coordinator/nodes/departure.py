"""Decide when a run leaves nodes that a cloud will reclaim. No I/O.

A run leaves such nodes as soon as other nodes are ready. If there are none, it trains until there is just enough time
to save. Then it continues with fewer nodes, if this is allowed. Otherwise it saves, releases all nodes and waits for
others.
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

SAVE_S = 60.0  # the run saves at the latest this long before a node is reclaimed
LAST_S = 10.0  # workers that have not saved this long before a node is reclaimed are stopped
AVOID_S = 120.0  # the next job avoids a node for this long if an agent reads a notice there after its deadline
MAX_SAVE_S, MIN_SAVE_S = 120.0, 2.0  # limits on the time that workers get to save


@dataclass(frozen=True)
class Departure:
    """The nodes to leave now, and the time that workers have to save.

    If `reclaim` is set, the run cannot continue without these nodes.
    """

    nodes: tuple[str, ...]
    save_s: float
    reclaim: bool = False


class Departures:
    """The nodes of a run that a cloud will reclaim, known from drain reasons and from the run's own agents."""

    def __init__(self, terms: AllocationTerms) -> None:
        self._terms = terms
        self._drained: dict[str, CloudNotice] = {}
        self._read_by_agents: dict[str, CloudNotice] = {}
        self._read_at: dict[str, float] = {}  # node -> when its agent last reported the notice, by this machine's clock
        self._until: dict[str, float] = {}  # node -> when it is reclaimed, by this machine's clock
        self._departing: set[str] = set()  # nodes that the run has been ordered to leave

    @property
    def notices(self) -> Mapping[str, CloudNotice]:
        return {**self._drained, **self._read_by_agents}

    @property
    def read_by_agents(self) -> frozenset[str]:
        """The nodes whose agents have read a notice. Slurm may still show them in service."""
        return frozenset(self._read_by_agents)

    def nodes_seen(self, nodes: Iterable[NodeInfo], now: float) -> list[Action]:
        """Record the notices in the drain reasons of all nodes, and report new ones."""
        known = self.notices
        self._drained = find_notices(nodes)
        self._update(now)
        return [action for node in self._drained if node not in known for action in self._report(node)]

    def notice_read(self, node: str, notice: CloudNotice, now: float) -> list[Action]:
        """Record a notice that an agent of the run has read on its node, and report it if it is new."""
        new = node not in self.notices
        self._read_by_agents[node], self._read_at[node] = notice, now
        self._update(now)
        return self._report(node) if new else []

    def still_in_service(self, now: float) -> dict[str, float]:
        """Return the nodes whose agents have read a notice, with the time until which the next job avoids them.

        Slurm may still use these nodes, because the controller may not know the notices, or only observes. A cloud may
        also take a machine some minutes after the deadline.
        """
        until = {node: self._avoid_until(node) for node in self._read_by_agents}
        return {node: end for node, end in until.items() if end > now}

    def _avoid_until(self, node: str) -> float:
        deadline, read_at = self._until[node], self._read_at[node]
        return deadline if read_at < deadline else read_at + AVOID_S

    def forget(self, nodes: Collection[str]) -> None:
        """Forget the notices that agents read on nodes that have since been replaced."""
        self._read_by_agents = {node: notice for node, notice in self._read_by_agents.items() if node not in nodes}

    def _update(self, now: float) -> None:
        self._until = {node: self._until.get(node, _end_of(notice, now)) for node, notice in self.notices.items()}

    def _report(self, node: str) -> list[Action]:
        notice = self.notices[node]
        what = {"node": node, "kind": notice.kind.value, "deadline": notice.deadline}
        return [WriteJournal(RunEvent.NOTICE, what), WriteNote(f"{node}: {notice.summary}"), CheckAgents()]

    def leave(self, view: RunView) -> list[Action]:
        """Leave nodes if other nodes are ready, or if there is just enough time to save."""
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
    """Return when the node is reclaimed.

    For a spot instance, this is at most SPOT_S from now, even if this machine's clock is wrong.
    """
    return min(notice.deadline, now + SPOT_S) if notice.kind is NoticeKind.SPOT else notice.deadline


def plan_departure(
    until: Mapping[str, float], ready: Collection[str], least: int, wanted: int, now: float, home: str = ""
) -> Departure | None:
    """Return how to leave the nodes that will be reclaimed; None if it is too early to act.

    `until` maps these nodes to the time of reclaim. `ready` contains the nodes with a ready agent. The run needs at
    least `least` nodes and asks for `wanted` nodes. `home` is the coordinator's node if the coordinator runs in the
    job; the job ends if it loses that node.
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
