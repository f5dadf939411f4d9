"""The alert rules, as data. A test for each rule shows that it fires on bad data and not on good data.

Rules must work with every number of nodes. So an expression compares the series of one node, GPU, partition or run with
each other, or compares a series with a limit. Most alerts wait (`for_s`) longer than the controller needs for a repair.
Alerts about node faults do not wait: they are sent even if the node was repaired at once, and fire for the time
`REMEMBERED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dalsegno.health.result import Remedy
from dalsegno.health.xids import table as xid_table

HOT_C = 90
SLOW_RANK = 1.3  # a rank is slow if its step time exceeds the median of its run by this factor
LOW_GOODPUT = 0.8
FULL = 0.05  # a file system is full if less than this share is free
STALLED_STEPS, STALLED_S = 20, 300
REMEMBERED, REMEMBERED_S = "15m", 900
_UNREAL = "tmpfs|ramfs|devtmpfs|overlay|squashfs|iso9660|proc|sysfs|cgroup2?|nsfs|autofs|fuse.*"


class AlertSeverity(Enum):
    """The urgency of an alert."""

    CRITICAL = "critical"  # jobs are losing work now
    WARNING = "warning"


@dataclass(frozen=True)
class AlertRule:
    """An alert: the condition under which it fires, and its texts for people."""

    name: str
    subject: str  # name of the group that the rule belongs to
    expr: str
    summary: str
    action: str
    for_s: int = 0
    severity: AlertSeverity = AlertSeverity.WARNING


def harmful_xids() -> str:
    """Return a regular expression that matches the Xids that need a remedy. Other Xids are caused by programs, or are
    only watched."""
    harmful = [str(each.xid) for each in xid_table().values() if each.remedy not in (Remedy.NONE, Remedy.WATCH)]
    return "|".join(harmful)


def _faults(checks: str) -> str:
    """Return an expression for recent faults, from the controller's journal.

    The expression also finds faults that were repaired between two scrapes, and faults of machines that were replaced.
    """
    return f"time() - dalsegno_recovery_last_fault_timestamp_seconds{{{checks}}} < {REMEMBERED_S}"


def _gpu_faults(checks: str) -> str:
    """Return the expression of `_faults` with the label `instance`, which metrics from nodes carry."""
    return f'label_replace({_faults(checks)}, "instance", "$1", "node", "(.*)")'


_XIDS = "DCGM_EXP_XID_ERRORS_COUNT"
_RECENT_XIDS = f'max_over_time({_XIDS}{{xid=~"{harmful_xids()}"}}[{REMEMBERED}])'
_XID_FAULTS, _MEMORY_FAULTS = _gpu_faults('check="xid"'), _gpu_faults('check=~"gpu-ecc|gpu-rows"')
_WITH_GPU = "{{ with $labels.gpu }}GPU {{ . }} of {{ end }}{{ $labels.instance }}"

NODES = (
    AlertRule(
        "NodeLost",
        "nodes",
        _faults('check="gone"'),
        "{{ $labels.node }} was lost",
        "`dalsegno why {{ $labels.node }}` shows what was done; jobs that were on it have lost a node",
    ),
    AlertRule(
        "NodeFault",
        "nodes",
        _faults('check!~"gone|xid|gpu-ecc|gpu-rows"'),  # the excluded checks have their own alerts
        "{{ $labels.node }} was taken out of service: {{ $labels.check }}{{ with $labels.code }} ({{ . }}){{ end }}",
        "`dalsegno why {{ $labels.node }}` shows the fault and what was done",
    ),
    AlertRule(
        "NodeDown",
        "nodes",
        'dalsegno_node_state{state=~"down|fail|err"} == 1',
        "{{ $labels.node }} is {{ $labels.state }} in Slurm",
        "`dalsegno why {{ $labels.node }}` shows what happened",
        for_s=300,
        severity=AlertSeverity.CRITICAL,
    ),
    AlertRule(
        "NodeDrained",
        "nodes",
        # Spares are excluded, because they stay drained until a run needs them.
        'dalsegno_node_state{state="drain"} == 1'
        ' unless on (node) label_replace(up{job="node", spare="yes"}, "node", "$1", "instance", "(.*)")',
        "{{ $labels.node }} has been drained for half an hour",
        "`dalsegno why {{ $labels.node }}` shows the reason; `scontrol update` returns the node",
        for_s=1800,
    ),
    AlertRule(
        "DiskFull",
        "nodes",
        f'node_filesystem_avail_bytes{{fstype!~"{_UNREAL}"}} / node_filesystem_size_bytes < {FULL}'
        " and node_filesystem_readonly == 0",
        "{{ $labels.mountpoint }} on {{ $labels.instance }} is {{ $value | humanizePercentage }} free",
        "remove old checkpoints and logs; Slurm drains a node whose spool folder is full",
        for_s=600,
        severity=AlertSeverity.CRITICAL,
    ),
)

GPUS = (
    AlertRule(
        "GpuXid",
        "gpus",
        # The count of an Xid appears with its first event. Without an earlier zero, increase() would miss this event.
        f"{_RECENT_XIDS} - ({_XIDS} offset {REMEMBERED} or {_RECENT_XIDS} * 0) > 0"
        f' or on (instance, xid) label_replace({_XID_FAULTS}, "xid", "$1", "code", "(.*)")',
        f"Xid {{{{ $labels.xid }}}} on {_WITH_GPU}",
        "`dalsegno nodes show {{ $labels.instance }}` shows the GPU and what was done",
        severity=AlertSeverity.CRITICAL,
    ),
    AlertRule(
        "GpuEcc",
        "gpus",
        f"max_over_time(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL[{REMEMBERED}]) > 0"
        f" or max_over_time(DCGM_FI_DEV_ROW_REMAP_FAILURE[{REMEMBERED}]) > 0"
        f" or on (instance) {_MEMORY_FAULTS}",
        f"uncorrectable memory errors on {_WITH_GPU}",
        "`dalsegno nodes show {{ $labels.instance }}` shows the GPU and what was done",
        for_s=60,
        severity=AlertSeverity.CRITICAL,
    ),
    AlertRule(
        "GpuHot",
        "gpus",
        f"DCGM_FI_DEV_GPU_TEMP > {HOT_C}",
        "GPU {{ $labels.gpu }} of {{ $labels.instance }} is at {{ $value }} °C",
        "check fans and air flow; a hot GPU slows down and delays the whole run",
        for_s=120,
    ),
)

RUNS = (
    AlertRule(
        "SlowRank",
        "runs",
        f"training_rank_step_ratio > {SLOW_RANK}",
        "rank {{ $labels.rank }} of run {{ $labels.run }} takes {{ $value | humanize }} times the median step time",
        "`dalsegno runs show {{ $labels.run }}` names its node; all other ranks wait for it",
        for_s=300,
    ),
    AlertRule(
        "RunStalled",
        "runs",
        "time() - training_last_step_timestamp_seconds"
        f" > clamp_min({STALLED_STEPS} * training_step_seconds, {STALLED_S})"
        ' and on (run) training_run_info{phase=~"running|stopping|restarting"} == 1',
        "run {{ $labels.run }} has made no step for {{ $value | humanizeDuration }}",
        "`dalsegno why {{ $labels.run }}` shows what it waits for",
        for_s=60,
        severity=AlertSeverity.CRITICAL,
    ),
    AlertRule(
        "GoodputLow",
        "runs",
        f"training_goodput_ratio < {LOW_GOODPUT} and on (run) sum by (run) (training_time_seconds_total) > 3600"
        ' and on (run) training_run_info{phase="running"} == 1',
        "run {{ $labels.run }} trains only {{ $value | humanizePercentage }} of its time",
        "`dalsegno runs show {{ $labels.run }}` shows where the rest goes",
        for_s=900,
    ),
)

RECOVERY = (
    AlertRule(
        "ReplacementFailing",
        "recovery",
        "increase(dalsegno_recovery_replacements_failed_total[1h]) > 0",
        "replacing nodes has failed {{ $value | humanize }} times in the last hour",
        "`dalsegno events` shows the errors; `dalsegno automation resume` tries again",
        severity=AlertSeverity.CRITICAL,
    ),
    AlertRule(
        "AutomationOutOfBudget",
        "recovery",
        'sum by (reason) (dalsegno_recovery_held_back{reason=~"out|hour"}) > 0',
        "{{ $value | humanize }} nodes are not repaired: automation has used up its budget",
        "`dalsegno events` shows the nodes; `dalsegno automation resume` resets the hourly budget",
        for_s=60,
        severity=AlertSeverity.CRITICAL,
    ),
    AlertRule(
        "AutomationPaused",
        "recovery",
        "dalsegno_recovery_paused == 1",
        "automatic recovery has been paused for an hour",
        "`dalsegno automation resume` resumes it",
        for_s=3600,
    ),
)

QUEUE = (
    AlertRule(
        "QueueStuck",
        "queue",
        'sum by (partition) (dalsegno_jobs_pending_reason{reason=~"Resources|Priority|None"}) > 0'
        ' and on (partition) sum by (partition) (dalsegno_nodes{state=~"idle|mix"}) > 0'
        " and on (partition) sum by (partition) (increase(slurm_job_queue_wait_seconds_count[30m])) == 0",
        "no job of partition {{ $labels.partition }} has started for an hour; {{ $value | humanize }} wait",
        "`squeue --start` shows what they wait for; `sdiag` shows whether the scheduler works",
        for_s=1800,
    ),
)

EXPORTERS = (
    AlertRule(
        "ExporterDown",
        "exporters",
        'up{job=~"node|dalsegno"} == 0',
        "Prometheus cannot read the metrics of {{ $labels.instance }} (job {{ $labels.job }})",
        "`dalsegno monitor check` shows the error; the node itself may be off",
        for_s=300,
    ),
    AlertRule(
        "CollectorFailing",
        "exporters",
        "dalsegno_collector_success == 0",
        "the metrics of {{ $labels.source }} are not collected",
        "`dalsegno logs --daemon observer` shows the error",
        for_s=120,
    ),
    AlertRule(
        "NodeMetricsMissing",
        "exporters",
        'up{job="node", partition!=""} == 1 unless on (instance)'
        " (time() - dalsegno_node_metrics_timestamp_seconds < 300 and on (instance) node_textfile_scrape_error == 0)",
        "the GPU and fabric metrics of {{ $labels.instance }} are missing or old",
        "`dalsegno logs --daemon node-agent` shows whether the node agent runs",
        for_s=300,
    ),
)

ALERTS: tuple[AlertRule, ...] = (*NODES, *GPUS, *RUNS, *RECOVERY, *QUEUE, *EXPORTERS)
