"""Slurm metrics that have the same names and labels in both dialects.

vpenso's prometheus-slurm-exporter (dashboard 4323) and SckyzO's slurm_exporter (Amazon SageMaker HyperPod) share most
names. Metrics that differ are in `slurm_vpenso.py` and `slurm_sckyzo.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dalsegno.observe.exposition import Family, gauge, labelled
from dalsegno.observe.slurm_jobs import JobGroups
from dalsegno.observe.slurm_nodes import by_partition, count_gpus, each_node
from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.controller import Diagnostics
from dalsegno.slurm.parse.load import NodeLoad

Values = dict[tuple[str, ...], float]


class SlurmDialect(Enum):
    """The exporter whose names the slurm_* metrics use. Only one is served: some metrics differ only in labels."""

    VPENSO = "vpenso"
    SCKYZO = "sckyzo"


def cpu_families(rows: Sequence[NodeLoad]) -> list[Family]:
    """Return the CPUs of the cluster and of each partition, by use."""
    all_nodes = _count_cpus(each_node(rows))
    partitions = {name: _count_cpus(members) for name, members in by_partition(rows).items()}
    families: list[Family] = []
    for at, (short, word, help) in enumerate(_CPU_NAMES):
        values: Values = {(name,): counts[at] for name, counts in partitions.items()}
        families.append(gauge(f"slurm_cpus_{short}", f"{help}.", all_nodes[at]))
        families.append(labelled(f"slurm_partition_cpus_{word}", f"{help} of a partition.", ["partition"], values))
    return families


_CPU_NAMES = (
    ("alloc", "allocated", "Allocated CPUs"),
    ("idle", "idle", "Idle CPUs"),
    ("other", "other", "Unavailable CPUs"),
    ("total", "total", "All CPUs"),
)


def _count_cpus(rows: Sequence[NodeLoad]) -> tuple[int, int, int, int]:
    return (
        sum(row.cpus_alloc for row in rows),
        sum(row.cpus_idle for row in rows),
        sum(row.cpus_other for row in rows),
        sum(row.cpus for row in rows),
    )


def gpu_families(rows: Sequence[NodeLoad], *, other: bool) -> list[Family]:
    """Return the GPUs of the cluster by use. Without `other`, unavailable GPUs count as idle."""
    counts = count_gpus(each_node(rows))
    total = sum(counts)
    families: list[Family] = [
        gauge("slurm_gpus_alloc", "Allocated GPUs.", counts.alloc),
        gauge("slurm_gpus_idle", "Idle GPUs.", counts.idle + (0 if other else counts.unavailable)),
        gauge("slurm_gpus_total", "All GPUs.", total),
        gauge("slurm_gpus_utilization", "Share of all GPUs that is allocated.", counts.alloc / total if total else 0),
    ]
    if other:
        families.append(gauge("slurm_gpus_other", "Free GPUs on nodes out of service.", counts.unavailable))
    return families


def owner_families(groups: JobGroups) -> list[Family]:
    """Return the jobs and CPUs of each account and of each user."""
    accounts, users = dict[str, OwnerLoad](), dict[str, OwnerLoad]()
    for key, tally in groups.items():
        for owners, name in ((accounts, key.account), (users, key.user)):
            load = owners.get(name) or owners.setdefault(name, OwnerLoad())
            if key.state is JobState.PENDING:
                load.pending += tally.jobs
            elif key.state is JobState.RUNNING:
                load.running += tally.jobs
                load.cpus_running += tally.cpus
            elif key.state is JobState.SUSPENDED:
                load.suspended += tally.jobs
    return [*_owner_families("account", accounts), *_owner_families("user", users)]


@dataclass
class OwnerLoad:
    """The jobs of an account or a user."""

    pending: int = 0
    running: int = 0
    suspended: int = 0
    cpus_running: int = 0


def _owner_families(owner: str, loads: Mapping[str, OwnerLoad]) -> list[Family]:
    def family(name: str, help: str, value: Callable[[OwnerLoad], int]) -> Family:
        values: Values = {(label,): value(load) for label, load in loads.items()}
        return labelled(f"slurm_{owner}_{name}", help, [owner], values)

    return [
        family("jobs_pending", f"Pending jobs of the {owner}.", lambda load: load.pending),
        family("jobs_running", f"Running jobs of the {owner}.", lambda load: load.running),
        family("jobs_suspended", f"Suspended jobs of the {owner}.", lambda load: load.suspended),
        family("cpus_running", f"CPUs of the running jobs of the {owner}.", lambda load: load.cpus_running),
    ]


def pending_family(groups: JobGroups, partitions: Sequence[str]) -> Family:
    """Return the pending jobs of each partition."""
    values: Values = {(name,): 0 for name in partitions}
    for key, tally in groups.items():
        if key.state is JobState.PENDING:
            for name in key.partitions:
                values[name,] = values.get((name,), 0) + tally.jobs
    return labelled("slurm_partition_jobs_pending", "Pending jobs of a partition.", ["partition"], values)


def scheduler_families(diag: Diagnostics) -> list[Family]:
    """Return sdiag's figures about the schedulers. Times are microseconds. Most counts restart at midnight."""
    found = {
        "threads": ("Threads of slurmctld.", diag.server_threads),
        "queue_size": ("Length of slurmctld's agent queue.", diag.agent_queue),
        "dbd_queue_size": ("Messages that wait for slurmdbd.", diag.dbd_queue),
        "last_cycle": ("Microseconds of the last scheduling cycle.", diag.main_last_cycle_us),
        "mean_cycle": ("Mean microseconds of a scheduling cycle.", diag.main_mean_cycle_us),
        "cycle_per_minute": ("Scheduling cycles per minute.", diag.main_cycles_per_minute),
        "backfill_last_cycle": ("Microseconds of the last backfill cycle.", diag.backfill_last_cycle_us),
        "backfill_mean_cycle": ("Mean microseconds of a backfill cycle.", diag.backfill_mean_cycle_us),
        "backfill_depth_mean": ("Mean number of jobs in a backfill cycle.", diag.backfill_mean_depth),
        "backfilled_jobs_since_start_total": ("Backfilled jobs since slurmctld started.", diag.backfilled_jobs),
        "backfilled_jobs_since_cycle_total": ("Backfilled jobs since midnight.", diag.backfilled_jobs_since_reset),
        "backfilled_heterogeneous_total": (
            "Backfilled components of heterogeneous jobs.",
            diag.backfilled_het_components,
        ),
    }
    return [gauge(f"slurm_scheduler_{name}", help, value) for name, (help, value) in found.items()]


def fair_share_family(shares: Mapping[str, float]) -> Family:
    """Return the fair-share factor of each account."""
    help = "Fair-share factor of an account: its own, or the mean of its users'."
    return labelled("slurm_account_fairshare", help, ["account"], {(name,): share for name, share in shares.items()})
