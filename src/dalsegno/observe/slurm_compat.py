"""Slurm metrics that both dialects have, under the same names and labels.

vpenso's prometheus-slurm-exporter (dashboard 4323) and SckyzO's slurm_exporter (Amazon SageMaker HyperPod) share most
names. Where they differ, `slurm_vpenso.py` and `slurm_sckyzo.py` have one each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from dalsegno.observe.exposition import Family, gauge, labelled
from dalsegno.observe.slurm_jobs import JobGroups
from dalsegno.observe.slurm_nodes import GpuUse, each_node, gpu_uses, partition_names
from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.controller import Diagnostics
from dalsegno.slurm.parse.load import NodeLoad

Values = dict[tuple[str, ...], float]


class SlurmDialect(Enum):
    """Whose names the slurm_* metrics have. Some names are the same with other labels, so it is one or the other."""

    VPENSO = "vpenso"
    SCKYZO = "sckyzo"


def cpu_families(rows: Sequence[NodeLoad]) -> list[Family]:
    """Return the CPUs of the cluster and of each partition, by use."""
    nodes, parts = each_node(rows), partition_names(rows)
    by_use = {
        "alloc": ("allocated", "Allocated CPUs", [row.cpus_alloc for row in rows], sum(n.cpus_alloc for n in nodes)),
        "idle": ("idle", "Idle CPUs", [row.cpus_idle for row in rows], sum(n.cpus_idle for n in nodes)),
        "other": ("other", "Unavailable CPUs", [row.cpus_other for row in rows], sum(n.cpus_other for n in nodes)),
        "total": ("total", "All CPUs", [row.cpus for row in rows], sum(n.cpus for n in nodes)),
    }
    families: list[Family] = []
    for short, (word, help, counts, total) in by_use.items():
        values: Values = {(name,): 0 for name in parts}
        for row, count in zip(rows, counts, strict=True):
            if row.partition:
                values[row.partition,] += count
        families.append(gauge(f"slurm_cpus_{short}", f"{help}.", total))
        families.append(labelled(f"slurm_partition_cpus_{word}", f"{help} of a partition.", ["partition"], values))
    return families


def gpu_families(rows: Sequence[NodeLoad], *, other: bool) -> list[Family]:
    """Return the GPUs of the cluster by use. Without `other`, free GPUs on closed nodes are idle."""
    counts = dict.fromkeys(GpuUse, 0)
    for row in each_node(rows):
        for use, count in gpu_uses(row).items():
            counts[use] += count
    total, alloc, closed = sum(counts.values()), counts[GpuUse.ALLOC], counts[GpuUse.UNAVAILABLE]
    families: list[Family] = [
        gauge("slurm_gpus_alloc", "Allocated GPUs.", alloc),
        gauge("slurm_gpus_idle", "Idle GPUs.", counts[GpuUse.IDLE] + (0 if other else closed)),
        gauge("slurm_gpus_total", "All GPUs.", total),
        gauge("slurm_gpus_utilization", "Share of all GPUs that is allocated.", alloc / total if total else 0),
    ]
    return [*families, gauge("slurm_gpus_other", "Free GPUs on closed nodes.", closed)] if other else families


_COUNTED = {JobState.PENDING: "jobs_pending", JobState.RUNNING: "jobs_running", JobState.SUSPENDED: "jobs_suspended"}


def owner_families(groups: JobGroups) -> list[Family]:
    """Return the jobs and CPUs of each account and of each user."""
    families: list[Family] = []
    for owner in ("account", "user"):
        tables: dict[str, Values] = {name: {} for name in (*_COUNTED.values(), "cpus_running")}
        for key, tally in groups.items():
            label = (key.account if owner == "account" else key.user,)
            for table in tables.values():
                table.setdefault(label, 0)
            if key.state in _COUNTED:
                tables[_COUNTED[key.state]][label] += tally.jobs
            if key.state is JobState.RUNNING:
                tables["cpus_running"][label] += tally.cpus
        for name, values in tables.items():
            what, _, state = name.partition("_")
            shown = "CPUs" if what == "cpus" else "Jobs"
            help = (
                f"{shown} of the {owner} that are {state}."
                if what == "jobs"
                else f"CPUs of running jobs of the {owner}."
            )
            families.append(labelled(f"slurm_{owner}_{name}", help, [owner], values))
    return families


def pending_family(groups: JobGroups, partitions: Sequence[str]) -> Family:
    """Return the pending jobs of each partition."""
    values: Values = {(name,): 0 for name in partitions}
    for key, tally in groups.items():
        if key.state is JobState.PENDING:
            for name in key.partitions:
                values[name,] = values.get((name,), 0) + tally.jobs
    return labelled("slurm_partition_jobs_pending", "Pending jobs of a partition.", ["partition"], values)


def scheduler_families(diag: Diagnostics) -> list[Family]:
    """Return what sdiag says about the schedulers. Times are microseconds, and counts restart at midnight."""
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
