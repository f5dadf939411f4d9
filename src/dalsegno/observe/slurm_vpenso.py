"""Slurm metrics with the names of vpenso's prometheus-slurm-exporter, for Grafana's dashboard 4323."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dalsegno.observe.exposition import Family, gauge, labelled
from dalsegno.observe.slurm_compat import Values, cpu_families, gpu_families, owner_families, pending_family
from dalsegno.observe.slurm_jobs import JobGroups
from dalsegno.observe.slurm_nodes import NodeCategory, each_node, node_category
from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.load import NodeLoad

DEPENDENCY = "Dependency"  # Slurm's name of the pending reason

_NODES = tuple(one for one in NodeCategory if one not in (NodeCategory.OTHER, NodeCategory.PLANNED))
_QUEUE = (
    JobState.PENDING,
    JobState.RUNNING,
    JobState.SUSPENDED,
    JobState.CANCELLED,
    JobState.COMPLETING,
    JobState.COMPLETED,
    JobState.CONFIGURING,
    JobState.FAILED,
    JobState.TIMEOUT,
    JobState.PREEMPTED,
    JobState.NODE_FAIL,
)


def vpenso_node_families(rows: Sequence[NodeLoad]) -> list[Family]:
    """Return the metrics of nodes, CPUs and GPUs. A node counts once, however many partitions it is in."""
    nodes = each_node(rows)
    counts = Counter(node_category(row.word) for row in nodes)
    return [
        *(gauge(f"slurm_nodes_{one.value}", f"Nodes in the state {one.value}.", counts[one]) for one in _NODES),
        *cpu_families(rows),
        *gpu_families(rows, other=False),
        *_each_node(nodes),
    ]


def _each_node(nodes: Sequence[NodeLoad]) -> list[Family]:
    keys = [(row.name, row.word) for row in nodes]

    def family(name: str, help: str, values: Sequence[int]) -> Family:
        found: Values = dict(zip(keys, values, strict=True))
        return labelled(f"slurm_node_{name}", help, ["node", "status"], found)

    return [
        family("cpu_alloc", "Allocated CPUs of a node.", [row.cpus_alloc for row in nodes]),
        family("cpu_idle", "Idle CPUs of a node.", [row.cpus_idle for row in nodes]),
        family("cpu_other", "Unavailable CPUs of a node.", [row.cpus_other for row in nodes]),
        family("cpu_total", "All CPUs of a node.", [row.cpus for row in nodes]),
        family("mem_alloc", "Allocated memory of a node in MiB.", [row.memory_used_mib for row in nodes]),
        family("mem_total", "All memory of a node in MiB.", [row.memory_mib for row in nodes]),
    ]


def vpenso_job_families(groups: JobGroups, partitions: Sequence[str]) -> list[Family]:
    """Return the metrics of the queue."""
    counts: Counter[JobState] = Counter()
    dependent = 0
    for key, tally in groups.items():
        counts[key.state] += tally.jobs
        dependent += tally.jobs if key.state is JobState.PENDING and key.reason == DEPENDENCY else 0
    return [
        *(gauge(f"slurm_queue_{one.name.lower()}", f"Jobs in the state {one.name}.", counts[one]) for one in _QUEUE),
        gauge("slurm_queue_pending_dependency", "Pending jobs that wait for other jobs.", dependent),
        *owner_families(groups),
        pending_family(groups, partitions),
    ]
