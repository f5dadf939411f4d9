"""Nodes that the cluster's controller has drained to mend them: a run leaves them once it has others. Pure.

A step would die with a node that is given back, so it stays in the job; that it was left, the job's comment says. The
controller then has Slurm take it from the job, which the step outlives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from dalsegno.launch.run_comment import OURS
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.render import SPARE_REASON


def to_be_mended(nodes: Iterable[NodeInfo]) -> dict[str, str]:
    """The controller's drains, and what for. Somebody else's say: take nothing new, and what runs may run on."""
    drained = [node for node in nodes if node.draining and node.reason.startswith(OURS)]
    return {node.name: node.reason.removeprefix(OURS) for node in drained if node.reason != SPARE_REASON}


def may_be_left(vacating: Mapping[str, str], ready: Collection[str], wanted: int) -> list[str]:
    """As many of them as the run can spare: it needs so many nodes."""
    here = sorted(set(vacating) & set(ready))
    return here[: max(0, len(ready) - wanted)]
