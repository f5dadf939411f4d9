"""Slurm metrics with the names of SckyzO's slurm_exporter, for the dashboards of Amazon SageMaker HyperPod."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dalsegno.observe.collector import SourceStatus, status_families
from dalsegno.observe.exposition import Family, gauge, labelled
from dalsegno.observe.slurm_compat import Values, cpu_families, gpu_families, owner_families, pending_family
from dalsegno.observe.slurm_jobs import JobGroups
from dalsegno.observe.slurm_nodes import NodeCategory, each_node, node_category
from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.controller import Diagnostics, RpcLoad
from dalsegno.slurm.parse.load import NodeLoad, ReservationInfo

NO_FEATURES = "null"  # slurm_exporter writes this for a node without features
_OTHER_STATES = (
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
_COMMANDS = ("sacct", "salloc", "sbatch", "scontrol", "sdiag", "sinfo", "squeue", "srun")


def sckyzo_node_families(rows: Sequence[NodeLoad]) -> list[Family]:
    """Return the metrics of nodes, CPUs and GPUs."""
    return [
        gauge("slurm_nodes_total", "All nodes.", len(each_node(rows))),
        *_nodes_by_features(rows),
        *cpu_families(rows),
        *gpu_families(rows, other=True),
        *_node_families(rows),
    ]


def _nodes_by_features(rows: Sequence[NodeLoad]) -> list[Family]:
    labels = {(row.partition, row.features or NO_FEATURES) for row in rows if row.partition}
    tables: dict[NodeCategory, Values] = {one: dict.fromkeys(sorted(labels), 0.0) for one in NodeCategory}
    for row in rows:
        if row.partition:
            tables[node_category(row.word)][row.partition, row.features or NO_FEATURES] += 1
    return [
        labelled(
            f"slurm_nodes_{one.value}",
            f"Nodes in the state {one.value}.",
            ["partition", "active_feature_set"],
            values,
        )
        for one, values in tables.items()
    ]


def _node_families(rows: Sequence[NodeLoad]) -> list[Family]:
    keys = [(row.name, row.word, row.partition) for row in rows]

    def family(name: str, help: str, values: Iterable[int]) -> Family:
        found: Values = dict(zip(keys, values, strict=True))
        return labelled(f"slurm_node_{name}", help, ["node", "status", "partition"], found)

    return [
        family("cpu_alloc", "Allocated CPUs of a node.", [row.cpus_alloc for row in rows]),
        family("cpu_idle", "Idle CPUs of a node.", [row.cpus_idle for row in rows]),
        family("cpu_other", "Unavailable CPUs of a node.", [row.cpus_other for row in rows]),
        family("cpu_total", "All CPUs of a node.", [row.cpus for row in rows]),
        family("mem_alloc", "Allocated memory of a node in MiB.", [row.memory_used_mib for row in rows]),
        family("mem_total", "All memory of a node in MiB.", [row.memory_mib for row in rows]),
        family("status", "The state of a node in each of its partitions; always 1.", [1] * len(rows)),
    ]


def sckyzo_job_families(groups: JobGroups, partitions: Sequence[str]) -> list[Family]:
    """Return the metrics of the queue, by user, partition and, for pending jobs, reason.

    Each partition also has a series with value 0 and no user, so that a sum returns data if no job is in that state.
    """
    return [
        *_queue_families(groups, partitions, (JobState.PENDING,), ["user", "partition", "reason"]),
        *_queue_families(groups, partitions, _OTHER_STATES, ["user", "partition"]),
        *owner_families(groups),
        pending_family(groups, partitions),
    ]


def _queue_families(
    groups: JobGroups, partitions: Sequence[str], states: Sequence[JobState], labels: Sequence[str]
) -> list[Family]:
    nobody = [("", partition, "")[: len(labels)] for partition in partitions]
    jobs: dict[JobState, Values] = {state: dict.fromkeys(nobody, 0) for state in states}
    cores: dict[JobState, Values] = {state: dict.fromkeys(nobody, 0) for state in states}
    for key, tally in groups.items():
        for partition in key.partitions if key.state in jobs else ():
            label = (key.user, partition, key.reason)[: len(labels)]
            jobs[key.state][label] = jobs[key.state].get(label, 0) + tally.jobs
            cores[key.state][label] = cores[key.state].get(label, 0) + tally.cpus
    families: list[Family] = []
    for state in states:
        word = state.name.lower()
        families.append(labelled(f"slurm_queue_{word}", f"Jobs in the state {state.name}.", labels, jobs[state]))
        help = f"CPUs of the jobs in the state {state.name}."
        families.append(labelled(f"slurm_cores_{word}", help, labels, cores[state]))
    return families


def rpc_families(diag: Diagnostics) -> list[Family]:
    """Return slurmctld's calls by message type and by user. The counts restart at midnight, so they are gauges."""
    return [
        *_rpcs("slurm_rpc_stats", "operation", diag.rpcs_by_type),
        *_rpcs("slurm_user_rpc_stats", "user", diag.rpcs_by_user),
    ]


def _rpcs(name: str, label: str, loads: Sequence[RpcLoad]) -> list[Family]:
    return [
        labelled(name, "Calls to slurmctld.", [label], {(one.name,): one.count for one in loads}),
        labelled(
            f"{name}_avg_time", "Mean microseconds of a call.", [label], {(one.name,): one.average_us for one in loads}
        ),
        labelled(
            f"{name}_total_time", "Microseconds of all calls.", [label], {(one.name,): one.total_us for one in loads}
        ),
    ]


def reservation_families(reservations: Sequence[ReservationInfo]) -> list[Family]:
    """Return the reservations."""

    def family(name: str, help: str, value: Callable[[ReservationInfo], int]) -> Family:
        values: Values = {(one.name,): value(one) for one in reservations}
        return labelled(f"slurm_reservation_{name}", help, ["reservation_name"], values)

    infos: Values = {
        (one.name, "ACTIVE" if one.active else "INACTIVE", one.users, one.nodes, one.partition, one.flags): 1
        for one in reservations
    }
    labels = ["reservation_name", "state", "users", "nodes", "partition", "flags"]
    return [
        labelled("slurm_reservation_info", "A reservation; always 1.", labels, infos),
        family("start_time_seconds", "Start of a reservation, in seconds since 1970.", lambda one: one.starts_at),
        family("end_time_seconds", "End of a reservation, in seconds since 1970.", lambda one: one.ends_at),
        family("node_count", "Nodes of a reservation.", lambda one: one.node_count),
        family("core_count", "Cores of a reservation.", lambda one: one.core_count),
    ]


def info_family(version: str) -> Family:
    """Return Slurm's version. All commands come from one package, so their versions are not queried separately."""
    values: Values = {("general", "", version): 1, **{("binary", name, version): 1 for name in _COMMANDS}}
    return labelled("slurm_info", "Version of Slurm; always 1.", ["type", "binary", "version"], values)


def sckyzo_status_families(sources: Sequence[SourceStatus]) -> list[Family]:
    """Return the collector's own metrics, also under the names of this dialect."""
    success: Values = {(one.name,): int(one.success) for one in sources}
    duration: Values = {(one.name,): one.duration_s for one in sources}
    return [
        *status_families(sources),
        labelled("slurm_exporter_collector_success", "1 if the last collection succeeded.", ["collector"], success),
        labelled(
            "slurm_exporter_collector_duration_seconds", "Duration of the last collection.", ["collector"], duration
        ),
    ]
