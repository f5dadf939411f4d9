"""PartitionName lines."""

from __future__ import annotations

from collections.abc import Mapping

from dalsegno.hostlist import compress
from dalsegno.slurm.render.lines import Settings, line, merged, number, without, yes
from dalsegno.spec.facts import Cluster, Node, Partition

_MEMORY_DEFAULTS = ("DefMemPerCPU", "DefMemPerNode", "DefMemPerGPU")


def partition_lines(cluster: Cluster) -> str:
    nodes = {node.name: node for node in cluster.nodes}
    return "".join(f"{line(_partition(partition, cluster, nodes))}\n" for partition in cluster.partitions)


def _partition(partition: Partition, cluster: Cluster, nodes: dict[str, Node]) -> Settings:
    members = [nodes[name] for name in partition.nodes if name in nodes]
    ours = {
        "PartitionName": partition.name,
        "Nodes": compress(partition.nodes),
        "Default": yes(partition.default),
        "MaxTime": number(partition.time_limit_min) or "INFINITE",
        "DefaultTime": number(partition.default_time_min),
        "MinNodes": number(partition.min_nodes),
        "MaxNodes": number(partition.max_nodes),
        "PriorityTier": number(partition.priority_tier),
        "PriorityJobFactor": number(partition.priority_factor),
        "OverSubscribe": partition.oversubscribe,
        "AllowAccounts": ",".join(partition.allow_accounts),
        "AllowGroups": ",".join(partition.allow_groups),
        "AllowQos": ",".join(partition.allow_qos),
        "PreemptMode": partition.preempt_mode,
        "Hidden": yes(partition.hidden),
        **_shares(members, cluster),
        "State": "UP",
    }
    if _says_memory(partition.extra):
        ours = without(ours, _MEMORY_DEFAULTS)
    return merged(ours, partition.extra)


def _shares(members: list[Node], cluster: Cluster) -> Settings:
    """A job that names no memory gets its CPUs' share of it, and a GPU brings its share of the CPUs.

    Slurm's own default is the whole node's memory: nobody else would fit beside the smallest job.
    """
    if not members:
        return {}
    per_gpu = min((node.cpus // node.gpus for node in members if node.gpus), default=0)
    shares = {"DefCpuPerGPU": str(per_gpu) if per_gpu else ""}
    if not _says_memory(cluster.slurm.extra):
        shares["DefMemPerCPU"] = str(max(1, min(node.memory_mib // max(1, node.cpus) for node in members)))
    return shares


def _says_memory(extra: Mapping[str, str]) -> bool:
    """Whether the user set a default of memory: Slurm's three ways to set one exclude each other."""
    return not {key.lower() for key in extra}.isdisjoint(key.lower() for key in _MEMORY_DEFAULTS)
