"""Decide when a run leaves nodes that its cloud takes away. Pure.

A run moves as soon as other nodes are ready. If there are none, it trains on until there is just enough time to save.
Then it continues with fewer nodes, if it may, or saves, releases all nodes and waits for others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dalsegno.wire.cloud_notice import SPOT_S, CloudNotice, NoticeKind

SAVE_S = 60.0  # time before the end of a node at which the run saves at the latest
LAST_S = 10.0  # workers that have not saved this long before the end of a node are stopped
MAX_SAVE_S, MIN_SAVE_S = 120.0, 2.0  # limits on the time that workers get to save


@dataclass(frozen=True)
class Departure:
    """Nodes to leave now, and how long workers have to save. `reclaim`: the run cannot continue without them."""

    nodes: tuple[str, ...]
    within_s: float
    reclaim: bool = False


@dataclass
class KnownNotices:
    """The notices about a run's nodes, from drain reasons and from the run's own agents."""

    _drained: dict[str, CloudNotice] = field(default_factory=dict)
    _told: dict[str, CloudNotice] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)  # node -> when it is taken, by this machine's clock

    def see(self, drained: Mapping[str, CloudNotice], now: float) -> list[str]:
        """Take the notices in the drain reasons of all nodes. Return the nodes with a new one."""
        new = [node for node in drained if node not in self.all]
        self._drained = dict(drained)
        self._update(now)
        return new

    def tell(self, node: str, notice: CloudNotice, now: float) -> bool:
        """Take a notice that a run agent has read. Return whether it is the first about this node."""
        new = node not in self.all
        self._told[node] = notice
        self._update(now)
        return new

    def forget(self, nodes: Collection[str]) -> None:
        """Forget what agents read on nodes that have been replaced since."""
        self._told = {node: notice for node, notice in self._told.items() if node not in nodes}
        self._update(0.0)

    def _update(self, now: float) -> None:
        self._until = {node: self._until.get(node, _end_of(notice, now)) for node, notice in self.all.items()}

    @property
    def all(self) -> Mapping[str, CloudNotice]:
        return {**self._drained, **self._told}

    @property
    def told(self) -> frozenset[str]:
        return frozenset(self._told)

    @property
    def until(self) -> Mapping[str, float]:
        return self._until


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
    within_s = min(max(first_s - LAST_S, MIN_SAVE_S), MAX_SAVE_S)
    others = len(set(ready) - set(until))
    if others >= wanted and home not in until:
        return Departure(tuple(taken), within_s)
    if first_s > SAVE_S:
        return None
    urgent = tuple(node for node in taken if until[node] - now <= SAVE_S)
    stay = len(set(ready) - set(urgent))
    return Departure(urgent, within_s, reclaim=home in urgent or stay < max(least, 1))
