"""Recording rules that provide the metric names of other Slurm exporters and of the OpenTelemetry collector.

The observer serves the metric names of one other exporter, which is called its dialect. The rules provide the names
that dashboards for further exporters query. A rule never records a name that the observer serves itself, because sums
would count each value twice. If a metric that a rule reads has certain labels in only one dialect, the rule sums over
these labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RecordingRule:
    """A metric that Prometheus computes: its name, its expression, and labels that all its series get."""

    record: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)


# Maps Slurm's name of a job state to the label `state` of dalsegno_jobs, which is also the suffix of slurm_queue_*.
_JOB_STATES = {
    "cancelled": "cancelled", "completed": "completed", "completing": "completing", "configuring": "configuring",
    "failed": "failed", "node_fail": "node_fail", "pending": "pending", "preempted": "preempted",
    "running": "running", "suspended": "suspended", "timeout": "timeout",
}  # fmt: skip
_HELD = ("pending", "running", "suspended")  # the states that are counted per user and account
_ONE_PER_NODE = "max by (node) (slurm_node_{})"  # a node in several partitions may have several series
_MIB = 1024 * 1024


def _sum(name: str) -> str:
    return f"sum({name})"


def _renamed(expr: str, old: str, new: str, kept: str) -> str:
    """Return an expression that renames the label `old` to `new` and drops all other labels except `kept`."""
    by = ", ".join(filter(None, (new, kept)))
    return f'sum by ({by}) (label_replace({expr}, "{new}", "$1", "{old}", "(.*)"))'


def _rivosinc() -> Iterator[RecordingRule]:
    status = _renamed("max by (node, status) (slurm_node_cpu_total)", "status", "state", "")
    yield RecordingRule("slurm_cpus_per_state", status)
    yield RecordingRule("slurm_node_count_per_state", status.replace("sum by", "count by", 1))
    yield RecordingRule("slurm_mem_real", _sum(_ONE_PER_NODE.format("mem_total")))
    yield RecordingRule("slurm_mem_alloc", _sum(_ONE_PER_NODE.format("mem_alloc")))
    yield RecordingRule("slurm_partition_total_cpus", "sum by (partition) (slurm_partition_cpus_total)")
    yield RecordingRule("slurm_partition_idle_cpus", "sum by (partition) (slurm_partition_cpus_idle)")
    yield RecordingRule("slurm_partition_node_count", "sum by (partition, state) (dalsegno_nodes)")
    for word, state in _JOB_STATES.items():
        jobs = f'sum by (partition) (dalsegno_jobs{{state="{state}"}})'
        yield RecordingRule("slurm_partition_job_state_total", jobs, {"state": word.upper()})
    for state in _HELD:
        shown = {"state": state.upper()}
        yield RecordingRule(
            "slurm_user_state_total", _renamed(f"slurm_user_jobs_{state}", "user", "username", ""), shown
        )
        accounts = f"sum by (account) (slurm_account_jobs_{state})"
        yield RecordingRule("slurm_account_job_state_total", accounts, shown)
    running = {"state": "RUNNING"}
    yield RecordingRule("slurm_user_cpu_alloc", _renamed("slurm_user_cpus_running", "user", "username", ""), running)
    yield RecordingRule("slurm_account_job_state_cpu_alloc", "sum by (account) (slurm_account_cpus_running)", running)
    yield RecordingRule("slurm_pending_reason_total", "sum by (reason) (dalsegno_jobs_pending_reason)")
    yield RecordingRule("slurm_daemon_thread_count", _sum("slurm_scheduler_threads"))
    yield RecordingRule("slurm_dbd_agent_queue_size", _sum("slurm_scheduler_dbd_queue_size"))
    yield RecordingRule("slurm_backfill_job_count", _sum("slurm_scheduler_backfilled_jobs_since_start_total"))


_SLINKY_NODES = {
    "allocated": "alloc", "completing": "comp", "down": "down", "drain": "drain", "error": "err", "fail": "fail",
    "idle": "idle", "maintenance": "maint", "mixed": "mix", "reserved": "resv",
}  # fmt: skip
_NODE_COUNT = "count(max by (node) (slurm_node_cpu_total))"


def _slinky() -> Iterator[RecordingRule]:
    yield RecordingRule("slurm_jobs_total", " + ".join(_sum(f"slurm_queue_{state}") for state in _JOB_STATES.values()))
    for word, state in _JOB_STATES.items():
        name = word.replace("_", "")
        yield RecordingRule(f"slurm_jobs_{name}_total", _sum(f"slurm_queue_{state}"))
        jobs = f'sum by (partition) (dalsegno_jobs{{state="{state}"}})'
        yield RecordingRule(f"slurm_partition_jobs_{name}_total", jobs)
    yield RecordingRule("slurm_jobs_cpus_alloc_total", _sum("slurm_cpus_alloc"))
    for state in _HELD:
        yield RecordingRule(f"slurm_account_jobs_{state}_total", f"sum by (account) (slurm_account_jobs_{state})")
        users = _renamed(f"slurm_user_jobs_{state}", "user", "username", "")
        yield RecordingRule(f"slurm_user_jobs_{state}_total", users)
    yield RecordingRule("slurm_account_jobs_cpus_alloc_total", "sum by (account) (slurm_account_cpus_running)")
    cpus = _renamed("slurm_user_cpus_running", "user", "username", "")
    yield RecordingRule("slurm_user_jobs_cpus_alloc_total", cpus)
    # The dialect sckyzo already serves this metric; the rule must not record it twice.
    yield RecordingRule("slurm_nodes_total", f'{_NODE_COUNT} unless on () slurm_nodes_total{{job=~"dalsegno|slurm"}}')
    for word, state in _SLINKY_NODES.items():
        yield RecordingRule(f"slurm_nodes_{word}_total", _sum(f"slurm_nodes_{state}"))
    for word, own in {"total": "cpu_total", "alloc_total": "cpu_alloc", "idle_total": "cpu_idle"}.items():
        yield RecordingRule(f"slurm_node_cpus_{word}", _ONE_PER_NODE.format(own))
    for word, own in {"bytes": "mem_total", "alloc_bytes": "mem_alloc"}.items():
        yield RecordingRule(f"slurm_node_memory_{word}", f"{_ONE_PER_NODE.format(own)} * {_MIB}")


_NATIVE_NODES = {"completing": "comp", "mixed": "mix"}  # other states have the same names in vpenso's exporter
_NATIVE_SCHEDULER = {
    "server_thread_cnt": "threads", "agent_queue_size": "queue_size", "slurmdbd_queue_size": "dbd_queue_size",
    "schedule_cycle_last": "last_cycle", "sched_mean_cycle": "mean_cycle", "bf_cycle_last": "backfill_last_cycle",
    "bf_mean_cycle": "backfill_mean_cycle", "bf_depth_mean": "backfill_depth_mean",
    "backfilled_jobs": "backfilled_jobs_since_start_total",
    "last_backfilled_jobs": "backfilled_jobs_since_cycle_total",
    "backfilled_het_jobs": "backfilled_heterogeneous_total",
}  # fmt: skip


def _native() -> Iterator[RecordingRule]:
    yield RecordingRule("slurm_jobs", " + ".join(_sum(f"slurm_queue_{state}") for state in _JOB_STATES.values()))
    for word, state in _JOB_STATES.items():
        name = "node_failed" if word == "node_fail" else word
        yield RecordingRule(f"slurm_jobs_{name}", _sum(f"slurm_queue_{state}"))
        if state != "pending":  # the observer itself serves slurm_partition_jobs_pending
            jobs = f'sum by (partition) (dalsegno_jobs{{state="{state}"}})'
            yield RecordingRule(f"slurm_partition_jobs_{name}", jobs)
    yield RecordingRule("slurm_partition_jobs", "sum by (partition) (dalsegno_jobs)")
    yield RecordingRule("slurm_jobs_cpus_alloc", _sum("slurm_cpus_alloc"))
    yield RecordingRule("slurm_jobs_gpus_alloc", _sum("slurm_gpus_alloc"))
    yield RecordingRule("slurm_nodes", _NODE_COUNT)
    for word, state in _NATIVE_NODES.items():
        yield RecordingRule(f"slurm_nodes_{word}", _sum(f"slurm_nodes_{state}"))
    for word in ("alloc", "completing", "down", "drain", "fail", "idle", "maint", "mixed", "planned", "resv"):
        state = _NATIVE_NODES.get(word, word)
        nodes = f'sum by (partition) (dalsegno_nodes{{state="{state}"}})'
        yield RecordingRule(f"slurm_partition_nodes_{word}", nodes)
    yield RecordingRule("slurm_partition_nodes", "sum by (partition) (dalsegno_nodes)")
    for word, own in {"cpus": "cpu_total", "cpus_alloc": "cpu_alloc", "cpus_idle": "cpu_idle"}.items():
        yield RecordingRule(f"slurm_node_{word}", _ONE_PER_NODE.format(own))
    yield RecordingRule("slurm_partitions", "count(count by (partition) (slurm_partition_cpus_total))")
    yield RecordingRule("slurm_partition_cpus", "sum by (partition) (slurm_partition_cpus_total)")
    yield RecordingRule("slurm_partition_nodes_cpus_alloc", "sum by (partition) (slurm_partition_cpus_allocated)")
    yield RecordingRule("slurm_partition_nodes_cpus_idle", "sum by (partition) (slurm_partition_cpus_idle)")
    yield RecordingRule("slurm_partition_gpus", "sum by (partition) (dalsegno_gpus)")
    for word, own in _NATIVE_SCHEDULER.items():
        yield RecordingRule(f"slurm_{word}", _sum(f"slurm_scheduler_{own}"))


# Counters that the OpenTelemetry collector renames when it writes to Prometheus, because they lack `_total`.
_OTEL_DCGM = (
    "TOTAL_ENERGY_CONSUMPTION", "PCIE_REPLAY_COUNTER", "UNCORRECTABLE_REMAPPED_ROWS", "CORRECTABLE_REMAPPED_ROWS",
    "THERMAL_VIOLATION", "POWER_VIOLATION",
)  # fmt: skip
EFA_COUNTERS = (
    "alloc_pd_err", "alloc_ucontext_err", "cmds_err", "completed_cmds", "create_ah_err", "create_cq_err",
    "create_qp_err", "impaired_remote_conn_events", "keep_alive_rcvd", "lifespan", "mmap_err", "no_completion_cmds",
    "rdma_read_bytes", "rdma_read_resp_bytes", "rdma_read_wr_err", "rdma_read_wrs", "rdma_write_bytes",
    "rdma_write_recv_bytes", "rdma_write_wr_err", "rdma_write_wrs", "recv_bytes", "recv_wrs", "reg_mr_err",
    "retrans_bytes", "retrans_pkts", "retrans_timeout_events", "rx_bytes", "rx_drops", "rx_pkts", "send_bytes",
    "send_wrs", "submitted_cmds", "tx_bytes", "tx_pkts", "unresponsive_remote_events",
)  # fmt: skip


def _otel() -> Iterator[RecordingRule]:
    for name in (*(f"DCGM_FI_DEV_{each}" for each in _OTEL_DCGM), *(f"node_amazonefa_{each}" for each in EFA_COUNTERS)):
        yield RecordingRule(f"{name}_total", name)


DIALECTS: Mapping[str, tuple[RecordingRule, ...]] = {
    "rivosinc": tuple(_rivosinc()),
    "slinky": tuple(_slinky()),
    "slurm": tuple(_native()),
    "otel": tuple(_otel()),
}
