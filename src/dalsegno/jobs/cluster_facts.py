"""What a plan has to know of the cluster: little, and on somebody else's cluster less."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.slurm.facts import NodeInfo
from dalsegno.slurm.parse.nodes import PartitionInfo
from dalsegno.spec.facts import Cluster, Node


@dataclass(frozen=True)
class PartitionFacts:
    """A partition. CPUs and GPUs are those of its smallest node; 0 and None: not known, or no limit."""

    name: str
    default: bool = False
    nodes: int = 0
    cpus: int = 0
    gpus: int = 0
    gpu_type: str = ""
    gres: str = "gpu"  # what Slurm calls them: gpu, neuron
    time_limit_s: int | None = None
    max_nodes: int | None = None


@dataclass(frozen=True)
class ClusterFacts:
    """A cluster as far as a run goes. `launcher` starts `dalsegno` on any node of it."""

    id: str = ""  # drawn when it was made; "" for one that is not ours
    controller: bool = False  # ours, on the head node: it starts coordinators
    partitions: tuple[PartitionFacts, ...] = ()  # none: not known
    launcher: tuple[str, ...] = ("dalsegno",)
    python: str = "python3"  # of runs that name no environment
    runs_folder: str = "runs"
    mpi_types: tuple[str, ...] = ()  # as `srun --mpi=list` tells
    containers: bool = True  # srun takes --container-image: Pyxis's plugin, or ours

    def partition(self, name: str) -> PartitionFacts | None:
        """The one a job with this `--partition` goes to; None where that is open. UsageError if it is not there."""
        known = {each.name: each for each in self.partitions}
        if not known or "," in name:
            return None
        if not name:
            return next((each for each in self.partitions if each.default), None)
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f"there are {', '.join(known)}")
            raise UsageError(f"there is no partition `{name}`", hint=hint)
        return known[name]


def partitions_of(cluster: Cluster) -> tuple[PartitionFacts, ...]:
    """From a cluster file of ours. Its spares are out of scheduling, so they do not count."""
    nodes = {node.name: node for node in cluster.nodes if not node.spare}
    return tuple(
        _with_nodes(
            PartitionFacts(
                name=each.name,
                default=each.default,
                time_limit_s=None if each.time_limit_min is None else each.time_limit_min * 60,
                max_nodes=each.max_nodes,
            ),
            [nodes[name] for name in each.nodes if name in nodes],
        )
        for each in cluster.partitions
    )


def partitions_seen(partitions: Iterable[PartitionInfo], nodes: Iterable[NodeInfo]) -> tuple[PartitionFacts, ...]:
    """From what Slurm itself tells of a cluster we know nothing of."""
    by_name = {node.name: node for node in nodes}
    return tuple(
        _with_nodes(
            PartitionFacts(name=each.name, default=each.default, time_limit_s=each.time_limit_s),
            [by_name[name] for name in each.nodes if name in by_name],
        )
        for each in partitions
    )


def _with_nodes(facts: PartitionFacts, nodes: list[Node] | list[NodeInfo]) -> PartitionFacts:
    if not nodes:
        return facts
    types = {node.gpu_type for node in nodes}
    kinds = {node.gres for node in nodes if isinstance(node, Node) and node.gpus}
    return PartitionFacts(
        name=facts.name,
        default=facts.default,
        nodes=len(nodes),
        cpus=min(node.cpus for node in nodes),
        gpus=min(node.gpus for node in nodes),
        gpu_type=types.pop() if len(types) == 1 else "",
        gres=kinds.pop() if len(kinds) == 1 else "gpu",
        time_limit_s=facts.time_limit_s,
        max_nodes=facts.max_nodes,
    )
