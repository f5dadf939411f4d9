"""Agents that take long to start: an image is imported first, or a prolog tries everything. Pure.

A second one beside it would only be in its way, and a node is not given up for it. But one that was booted again since,
or whose slurmd was started anew, has nothing left of what was begun there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from dalsegno.hostlist import compress
from dalsegno.slurm.facts import NodeInfo

LONG_S = 60.0  # what takes longer is told


def still_starting(ages_s: Mapping[str, float], nodes: Iterable[NodeInfo], now: float) -> list[str]:
    """Of nodes on which something was begun so long ago, those that still may come to it."""
    started = {node.name: node.slurmd_started_at or 0 for node in nodes}  # in whole seconds
    return [node for node, age_s in ages_s.items() if math.floor(now - age_s) > started.get(node, 0)]


def tell_slow(ages_s: Mapping[str, float], waits: Collection[str], told: set[str], log: object) -> str:
    """What to say of those that are waited for, once of each; "" for nothing."""
    new = sorted(node for node in waits if ages_s[node] >= LONG_S and node not in told)
    told.update(new)
    return f"agents take long to start on {compress(new)}, for an image or a prolog; {log} may say more" if new else ""
