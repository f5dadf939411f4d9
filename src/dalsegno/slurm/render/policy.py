"""How Slurm hands out machines: selection, scheduling, priority, preemption, accounting."""

from __future__ import annotations

from dalsegno.slurm import versions
from dalsegno.slurm.layout import Layout
from dalsegno.slurm.render.lines import Settings, number, tres
from dalsegno.slurm.version import Version
from dalsegno.spec.facts import Cluster, Slurm


def policy(cluster: Cluster, layout: Layout, slurm: Version) -> Settings:
    return {
        **_nodes(cluster, layout),
        **_scheduling(cluster),
        **_priority(cluster.slurm),
        **_preemption(cluster),
        **_accounting(cluster, layout, slurm),
    }


def _nodes(cluster: Cluster, layout: Layout) -> Settings:
    return {
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "GresTypes": "gpu" if any(node.gpus for node in cluster.nodes) else "",
        "SlurmdParameters": "config_overrides" if layout.overrides else "",
        "ProctrackType": f"proctrack/{layout.proctrack}",
        "TaskPlugin": layout.task_plugin,
        "MpiDefault": "none",
        # Nothing comes back into service before it is validated, whatever made it leave.
        "ReturnToService": "0",
        # GPUDirect and RDMA pin memory: the submitting shell's limit must not follow the job to the node.
        "PropagateResourceLimitsExcept": "MEMLOCK",
        "TopologyPlugin": "topology/tree" if cluster.slurm.topology else "",
    }


def _scheduling(cluster: Cluster) -> Settings:
    return {
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": ",".join(_scheduler_parameters(len(cluster.nodes))),
        # A job that no partition can ever run is refused when it is submitted, not left pending for good.
        "EnforcePartLimits": "ANY",
    }


def _scheduler_parameters(nodes: int) -> list[str]:
    """Quick starts where a pass over the queue is cheap; on large clusters Slurm's own patience.

    Backfill comes seldom enough that the main scheduler starts what can start: a job that backfill starts is not in
    slurmctld's saved state until something else happens, and is lost if slurmctld is killed before (seen on 22.05).
    """
    if nodes <= 128:
        pace = ["sched_interval=2", "bf_interval=10"]
    elif nodes <= 1024:
        pace = ["sched_interval=10", "bf_interval=30"]
    else:
        pace = ["sched_interval=30", "bf_interval=30"]
    return ["batch_sched_delay=0", *pace, "bf_continue"]


def _priority(slurm: Slurm) -> Settings:
    priority = slurm.priority
    return {
        "PriorityType": "priority/multifactor",
        "PriorityDecayHalfLife": number(priority.half_life_min),
        "PriorityUsageResetPeriod": priority.usage_reset,
        "PriorityCalcPeriod": number(priority.calc_period_min),
        "PriorityMaxAge": number(priority.max_age_min),
        "PriorityFavorSmall": "YES" if priority.favor_small else "NO",
        "PriorityWeightAge": number(priority.age),
        "PriorityWeightFairshare": number(priority.fair_share),
        "PriorityWeightJobSize": number(priority.job_size),
        "PriorityWeightPartition": number(priority.partition),
        "PriorityWeightQOS": number(priority.qos),
        "PriorityWeightTRES": tres(priority.tres),
    }


_PREEMPT_TYPES = {"qos": "preempt/qos", "partition": "preempt/partition_prio"}


def _preemption(cluster: Cluster) -> Settings:
    slurm = cluster.slurm
    if not slurm.preempt_by:
        return {}
    mode = slurm.preempt_mode.upper() or "REQUEUE"
    suspends = "SUSPEND" in {mode, *(partition.preempt_mode.upper() for partition in cluster.partitions)}
    # Suspended jobs are woken by the gang scheduler: Slurm refuses SUSPEND anywhere without GANG here.
    gang = ",GANG" if suspends and "GANG" not in mode else ""
    exempt_s = slurm.preempt_exempt_time_s
    return {
        "PreemptType": _PREEMPT_TYPES.get(slurm.preempt_by, slurm.preempt_by),
        "PreemptMode": mode + gang,
        "PreemptExemptTime": "" if exempt_s is None else duration(exempt_s),
    }


def duration(seconds: int) -> str:
    """`90061` → `1-01:01:01`: of Slurm's spellings of a time, the one that cannot be misread as minutes."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02d}:{minute:02d}:{second:02d}"


def _accounting(cluster: Cluster, layout: Layout, slurm: Version) -> Settings:
    gathered = {"JobAcctGatherType": "jobacct_gather/linux", "JobAcctGatherFrequency": "30"}
    if not cluster.slurm.accounting or layout.dbd is None:
        return gathered
    return gathered | {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": layout.dbd.host.address or layout.dbd.host.name,
        "AccountingStoragePort": str(layout.dbd.port),
        # slurmdbd is spoken to through this socket, not the one in AuthInfo.
        "AccountingStoragePass": layout.paths.munge_socket,
        "AccountingStorageTRES": _tracked(cluster),
        "AccountingStorageEnforce": ",".join(cluster.slurm.enforce),
        **_store_comments(slurm),
    }


def _tracked(cluster: Cluster) -> str:
    types = sorted({node.gpu_type for node in cluster.nodes if node.gpus and node.gpu_type})
    return ",".join(["gres/gpu", *(f"gres/gpu:{kind}" for kind in types)])


def _store_comments(slurm: Version) -> Settings:
    if versions.STORE_FLAGS.holds(slurm):
        return {"AccountingStoreFlags": "job_comment"}
    return {"AccountingStoreJobComment": "YES"}
