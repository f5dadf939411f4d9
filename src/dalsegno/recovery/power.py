"""Which lost nodes are off for certain, by the word of whoever keeps their machines: those need not be waited for."""

from __future__ import annotations

import time
from dataclasses import replace

from dalsegno.recovery.facts import Facts
from dalsegno.targets.base import CanSeePower

JUST_S = 10.0  # a node that was heard so lately is looked at closely: of others it does not matter any more
MOST_S = 2.0  # for all questions of one look: when a rack is lost, other nodes wait meanwhile


def look_at_power(facts: Facts, target: object) -> Facts:
    """Asked for nodes that were lost just now and are set down; where nobody knows, nothing is said."""
    nodes = facts.nodes or {}
    lost = [name for name, node in nodes.items() if node.gone and node.slurm.down and node.agent.quiet_s < JUST_S]
    if not lost or not isinstance(target, CanSeePower):
        return facts
    until = time.monotonic() + MOST_S
    off = {name: replace(nodes[name], off=True) for name in lost if time.monotonic() < until and target.is_off(name)}
    return replace(facts, nodes={**nodes, **off})
