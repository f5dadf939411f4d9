"""Nodes on which no agent could be started: how often it is tried, and when a node is trusted again. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dalsegno.launch.rhythm import ASK_SLURM_S
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.render import SPARE_REASON

MOST_TRIES = 5  # of one node, in a row, without its agent having become ready
ALONE_FROM = 3  # from this try on a node has an srun of its own: the fault may be another's
SOON_S, LATELY_S = 1.0, 60.0  # how often we ask for one that was given up so lately
FORGIVEN_S = 600.0  # given up so long ago, and Slurm has nothing against it: it is tried again


@dataclass
class Tries:
    """To start an agent, by node."""

    _count: dict[str, int] = field(default_factory=dict)

    def once_more(self, node: str) -> bool:
        """Count it; False if it has been tried too often."""
        self._count[node] = self._count.get(node, 0) + 1
        return self._count[node] <= MOST_TRIES

    def forget(self, *nodes: str) -> None:
        for node in nodes:
            self._count.pop(node, None)

    def together(self, nodes: Iterable[str]) -> list[tuple[str, ...]]:
        """Whom one srun is to start: all of them, but for those with which that has gone wrong before."""
        alone = [node for node in nodes if self._count.get(node, 0) >= ALONE_FROM]
        others = tuple(node for node in nodes if node not in alone)
        return [*([others] if others else []), *((node,) for node in alone)]


def trusted_again(
    given_up: Mapping[str, float], nodes: Iterable[NodeInfo], now: float, were_out: Collection[str] = ()
) -> list[str]:
    """Of nodes given up at these times, those whose slurmd was started since (rebuilt, or booted again), those that
    were out of service and are good again (somebody has looked at them: a cable was out, GPUs were reset; no slurmd is
    started for that), and those of long ago that Slurm has in service."""
    known = {node.name: node for node in nodes}
    return [
        name
        for name, at in given_up.items()
        if name in known and (_is_back(known[name], at, now) or (name in were_out and _is_good(known[name])))
    ]


def out_of_service(nodes: Iterable[NodeInfo]) -> set[str]:
    """Those that are down or drained; a spare is not."""
    return {node.name for node in nodes if node.down or (node.draining and node.reason != SPARE_REASON)}


def ask_again_s(given_up: Iterable[float], now: float) -> float:
    """When to ask Slurm next how these are: often while one may be back in a moment."""
    return SOON_S if any(now - at < LATELY_S for at in given_up) else ASK_SLURM_S


def _is_back(node: NodeInfo, given_up_at: float, now: float) -> bool:
    started = node.slurmd_started_at or 0  # in whole seconds
    return started >= math.floor(given_up_at) or (now - given_up_at > FORGIVEN_S and node.in_service)


def _is_good(node: NodeInfo) -> bool:
    return node.in_service or (node.responding and node.reason == SPARE_REASON)
