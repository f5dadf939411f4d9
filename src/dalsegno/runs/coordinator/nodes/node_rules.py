"""Rules that decide when nodes are lost, left or used again, and when a refused request is repeated."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dalsegno.hostlist import compress
from dalsegno.runs.comment import OURS
from dalsegno.runs.coordinator.site import ASK_SLURM_S
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.messages import SlurmRefusal, parse_refusal
from dalsegno.slurm.parse.srun import refused_containers, started_outside, why_not_started
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.wire.cloud_notice import CloudNotice, find_notice

# Nodes on which no agent starts, and lost nodes


MAX_TRIES = 5  # limit on consecutive attempts to start an agent on one node
ALONE_FROM = 3  # from this attempt on, a node gets its own srun, because another node may be at fault
SOON_S, LATELY_S = 1.0, 60.0  # Slurm is polled every SOON_S for LATELY_S after a node is lost
FORGIVEN_S = 600.0  # a node lost longer ago than this is used again if it is in service in Slurm


@dataclass
class Tries:
    """The number of consecutive attempts to start an agent, by node."""

    _count: dict[str, int] = field(default_factory=dict)

    def count_try(self, node: str) -> bool:
        """Count an attempt; return False if there were too many."""
        self._count[node] = self._count.get(node, 0) + 1
        return self._count[node] <= MAX_TRIES

    def forget(self, *nodes: str) -> None:
        for node in nodes:
            self._count.pop(node, None)

    def group_by_srun(self, nodes: Iterable[str]) -> list[tuple[str, ...]]:
        """Return the nodes of each srun. A node that failed repeatedly gets its own srun; all others share one."""
        alone = [node for node in nodes if self._count.get(node, 0) >= ALONE_FROM]
        others = tuple(node for node in nodes if node not in alone)
        return [*([others] if others else []), *((node,) for node in alone)]


def startup_failure(log: str, node: str) -> str:
    """Return a text to append to a message: why agents on this node end as soon as they start; "" if unknown."""
    if started_outside(log, node):
        return ": the container does not start there (run `dalsegno containers check` for the reason)"
    why = why_not_started(log, node)
    return f" ({why})" if why else ""


def container_faults(log: str, nodes: Collection[str]) -> list[str]:
    """Return the reasons why the container failed, if it failed on all nodes; otherwise an empty list."""
    refused = refused_containers(log)
    return list(dict.fromkeys(refused[node] for node in nodes)) if nodes and {*nodes} <= refused.keys() else []


def usable_again(
    lost_at: Mapping[str, float], nodes: Iterable[NodeInfo], now: float, were_out: Collection[str] = ()
) -> list[str]:
    """Return the lost nodes that may be used again, because one of these conditions is true:

    - The node's slurmd has started since the loss, because the node was rebuilt or rebooted.
    - Slurm has powered the node down since the loss, so that it boots with a new machine.
    - The node was out of service and is healthy again, for example after a GPU reset, which does not restart slurmd.
    - The node was lost long ago and is in service.
    """
    known = {node.name: node for node in nodes}
    return [
        name
        for name, at in lost_at.items()
        if name in known and (_is_back(known[name], at, now) or (name in were_out and _is_good(known[name])))
    ]


def out_of_service(nodes: Iterable[NodeInfo]) -> set[str]:
    """Return the nodes that are down or drained, except spares."""
    return {node.name for node in nodes if node.down or (node.draining and node.reason != SPARE_REASON)}


def ask_again_s(lost_at: Iterable[float], now: float) -> float:
    """Return the seconds until Slurm is polled again.

    The interval is shorter if a node was lost recently, because such a node may return soon.
    """
    return SOON_S if any(now - at < LATELY_S for at in lost_at) else ASK_SLURM_S


def _is_back(node: NodeInfo, lost_at: float, now: float) -> bool:
    started = node.slurmd_started_at or 0  # in whole seconds, so `lost_at` is rounded down too
    rebuilt = started >= math.floor(lost_at) or (node.on_demand and NodeFlag.POWERED_DOWN in node.flags)
    return rebuilt or (now - lost_at > FORGIVEN_S and node.in_service)


def _is_good(node: NodeInfo) -> bool:
    return node.in_service or (node.responding and node.reason == SPARE_REASON)


# Nodes that the controller has drained for repair. A run leaves them once it has other nodes


def drained_for_repair(nodes: Iterable[NodeInfo]) -> dict[str, str]:
    """Return the nodes that the controller has drained, and the reasons.

    Nodes that others have drained remain in use.
    """
    drained = [node for node in nodes if node.draining and node.reason.startswith(OURS)]
    return {node.name: node.reason.removeprefix(OURS) for node in drained if node.reason != SPARE_REASON}


def find_notices(nodes: Iterable[NodeInfo]) -> dict[str, CloudNotice]:
    """Return the notices that a cloud will reclaim nodes, from the reasons of drained and down nodes."""
    found = {node.name: find_notice(node.reason) for node in nodes if node.draining or node.down}
    return {name: notice for name, notice in found.items() if notice is not None}


def nodes_to_leave(vacating: Mapping[str, str], ready: Collection[str], wanted: int) -> list[str]:
    """Return the nodes in `vacating` that the run can leave while it keeps `wanted` nodes."""
    here = sorted(set(vacating) & set(ready))
    return here[: max(0, len(ready) - wanted)]


# Repeating refused requests


RETRY_S, MAX_RETRY_S = 5.0, 60.0
# If no node matches the request, wait longer, because each repetition adds a failed job to Slurm's accounting.
NO_NODES_RETRY_S, MAX_NO_NODES_RETRY_S = 60.0, 900.0


@dataclass
class Refusals:
    """Consecutive refusals of a request. The request may be repeated at once if an excluded node is allowed again."""

    count: int = 0
    why: str = ""  # the last reason; "" if the last request was not refused
    _without: frozenset[str] = frozenset()
    _not_before: float = 0.0

    def refused(self, why: str, without: Collection[str], now: float) -> bool:
        """Record a refusal and return whether its reason is new."""
        news = why != self.why
        self.count, self.why, self._without = self.count + 1, why, frozenset(without)
        no_nodes = parse_refusal(why) is SlurmRefusal.NO_SUCH_NODES
        first_s, max_s = (NO_NODES_RETRY_S, MAX_NO_NODES_RETRY_S) if no_nodes else (RETRY_S, MAX_RETRY_S)
        self._not_before = now + min(first_s * 2 ** min(self.count - 1, 20), max_s)
        return news

    def may_ask(self, without: Collection[str], now: float) -> bool:
        return not self.why or now >= self._not_before or not self._without <= set(without)

    def over(self) -> None:
        self.count, self.why = 0, ""


# Agents that are slow to start because of an image import or a long prolog


LONG_S = 60.0  # starts that take longer than this are reported


def still_starting(ages_s: Mapping[str, float], nodes: Iterable[NodeInfo], now: float) -> list[str]:
    """Return the nodes that have not rebooted since their srun started. Their agents may still connect."""
    # slurmd reports whole seconds, so the start of srun is rounded down too.
    started = {node.name: node.slurmd_started_at or 0 for node in nodes}
    return [node for node, age_s in ages_s.items() if math.floor(now - age_s) > started.get(node, 0)]


def describe_slow(ages_s: Mapping[str, float], waits: Collection[str], reported: set[str], log: object) -> str:
    """Return a note about slow nodes that are not in `reported`, and add them to it; "" if there are none."""
    new = sorted(node for node in waits if ages_s[node] >= LONG_S and node not in reported)
    reported.update(new)
    return f"agents are slow to start on {compress(new)} (image import or prolog); see {log}" if new else ""
