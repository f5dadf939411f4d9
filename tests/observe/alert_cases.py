"""For each alert: series on which it fires, and similar series on which it does not.

The notation is that of `promtool test rules`: `1x60` is 61 samples of 1, `0+1x60` grows by 1 each minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Series = Mapping[str, str]
RUN = '{run="r1", user="ann"}'
INFO = 'training_run_info{run="r1", user="ann", name="gpt", phase="running", job_id="7"}'
GPU = '{instance="n1", gpu="0", Hostname="n1"}'
DISK = '{instance="n1", device="/dev/sda", fstype="ext4", mountpoint="/"}'


@dataclass(frozen=True)
class AlertCase:
    """Series on which an alert fires, series on which it does not, and the time at which it is evaluated."""

    bad: Series
    good: Series
    at: str = "70m"


def fault(check: str, code: str = "", node: str = "n1") -> str:
    return f'dalsegno_recovery_last_fault_timestamp_seconds{{node="{node}", check="{check}", code="{code}"}}'


RECENT, OLD = "_x65 3960x20", "60x80"  # minute 66, and over an hour ago; both were repaired at once
CASES: Mapping[str, AlertCase] = {
    "NodeLost": AlertCase(
        {fault("gone"): RECENT}, {fault("gone"): OLD, fault("disk"): RECENT, fault("xid", "79"): RECENT}
    ),
    "NodeFault": AlertCase(
        {fault("disk", "full"): RECENT}, {fault("disk", "full"): OLD, fault("gone"): RECENT, fault("xid", "79"): RECENT}
    ),
    "NodeDown": AlertCase(
        {'dalsegno_node_state{node="n1", state="down"}': "1x80"},
        {
            'dalsegno_node_state{node="n1", state="idle"}': "1x80",
            'dalsegno_node_state{node="n2", state="down"}': "1x3 stale",
        },
    ),
    "NodeDrained": AlertCase(
        {'dalsegno_node_state{node="n1", state="drain"}': "1x80", 'up{job="node", instance="n1"}': "1x80"},
        {'dalsegno_node_state{node="n1", state="drain"}': "1x80", 'up{job="node", instance="n1", spare="yes"}': "1x80"},
    ),
    "DiskFull": AlertCase(
        {
            f"node_filesystem_avail_bytes{DISK}": "4x80",
            f"node_filesystem_size_bytes{DISK}": "100x80",
            f"node_filesystem_readonly{DISK}": "0x80",
        },
        {
            f"node_filesystem_avail_bytes{DISK}": "20x80",
            f"node_filesystem_size_bytes{DISK}": "100x80",
            f"node_filesystem_readonly{DISK}": "0x80",
            'node_filesystem_avail_bytes{instance="n1", fstype="squashfs", mountpoint="/snap"}': "0x80",
            'node_filesystem_size_bytes{instance="n1", fstype="squashfs", mountpoint="/snap"}': "100x80",
            'node_filesystem_readonly{instance="n1", fstype="squashfs", mountpoint="/snap"}': "1x80",
        },
    ),
    "GpuXid": AlertCase(
        {'DCGM_EXP_XID_ERRORS_COUNT{instance="n1", gpu="0", xid="79"}': "_x60 1x20"},
        {
            'DCGM_EXP_XID_ERRORS_COUNT{instance="n1", gpu="0", xid="79"}': "1x80",  # the Xid is from an hour ago
            # This Xid is caused by the program.
            'DCGM_EXP_XID_ERRORS_COUNT{instance="n1", gpu="1", xid="13"}': "_x60 1x20",
        },
    ),
    "GpuEcc": AlertCase(
        {f"DCGM_FI_DEV_ROW_REMAP_FAILURE{GPU}": "1x80", f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{GPU}": "0x80"},
        {f"DCGM_FI_DEV_ROW_REMAP_FAILURE{GPU}": "0x80", f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{GPU}": "0x80"},
    ),
    "GpuHot": AlertCase({f"DCGM_FI_DEV_GPU_TEMP{GPU}": "95x80"}, {f"DCGM_FI_DEV_GPU_TEMP{GPU}": "80x80"}),
    "SlowRank": AlertCase(
        {'training_rank_step_ratio{run="r1", user="ann", rank="3"}': "1.6x80"},
        {'training_rank_step_ratio{run="r1", user="ann", rank="3"}': "1.05x80"},
    ),
    "RunStalled": AlertCase(
        {f"training_last_step_timestamp_seconds{RUN}": "60x80", f"training_step_seconds{RUN}": "0.5x80", INFO: "1x80"},
        {
            f"training_last_step_timestamp_seconds{RUN}": "0+60x80",
            f"training_step_seconds{RUN}": "0.5x80",
            INFO: "1x80",
            'training_last_step_timestamp_seconds{run="r2", user="ann"}': "60x80",  # this run has ended
            'training_step_seconds{run="r2", user="ann"}': "0.5x80",
            'training_run_info{run="r2", user="ann", name="gpt", phase="ended", job_id="8"}': "1x80",
        },
    ),
    "GoodputLow": AlertCase(
        {
            f"training_goodput_ratio{RUN}": "0.5x80",
            'training_time_seconds_total{run="r1", user="ann", kind="train"}': "0+60x80",
            'training_time_seconds_total{run="r1", user="ann", kind="restart"}': "0+60x80",
            INFO: "1x80",
        },
        {
            f"training_goodput_ratio{RUN}": "0.97x80",
            'training_time_seconds_total{run="r1", user="ann", kind="train"}': "0+60x80",
            INFO: "1x80",
            'training_goodput_ratio{run="r2", user="ann"}': "0.2x80",  # this run has just begun
            'training_time_seconds_total{run="r2", user="ann", kind="start"}': "0+1x80",
            'training_run_info{run="r2", user="ann", name="gpt", phase="running", job_id="8"}': "1x80",
        },
    ),
    "ReplacementFailing": AlertCase(
        {"dalsegno_recovery_replacements_failed_total": "0x60 1x20"},
        {"dalsegno_recovery_replacements_failed_total": "4x80"},
    ),
    "AutomationOutOfBudget": AlertCase(
        {'dalsegno_recovery_held_back{reason="hour"}': "2x80"},
        {'dalsegno_recovery_held_back{reason="hour"}': "0x80", 'dalsegno_recovery_held_back{reason="paused"}': "1x80"},
    ),
    "AutomationPaused": AlertCase({"dalsegno_recovery_paused": "1x80"}, {"dalsegno_recovery_paused": "0x60 1x20"}),
    "QueueStuck": AlertCase(
        {
            'dalsegno_jobs_pending_reason{partition="train", reason="Resources"}': "3x80",
            'dalsegno_nodes{partition="train", state="idle"}': "2x80",
            'slurm_job_queue_wait_seconds_count{partition="train"}': "9x80",
        },
        {
            'dalsegno_jobs_pending_reason{partition="train", reason="Resources"}': "3x80",
            'dalsegno_nodes{partition="train", state="idle"}': "2x80",
            'slurm_job_queue_wait_seconds_count{partition="train"}': "0+1x80",  # jobs do start here
            'dalsegno_jobs_pending_reason{partition="full", reason="Resources"}': "3x80",
            'dalsegno_nodes{partition="full", state="idle"}': "0x80",  # no node is idle here
            'slurm_job_queue_wait_seconds_count{partition="full"}': "9x80",
        },
    ),
    "ExporterDown": AlertCase(
        {'up{job="node", instance="n1"}': "0x80"},
        {'up{job="node", instance="n1"}': "1x80", 'up{job="other", instance="n1"}': "0x80"},
    ),
    "CollectorFailing": AlertCase(
        {'dalsegno_collector_success{source="squeue"}': "0x80"}, {'dalsegno_collector_success{source="squeue"}': "1x80"}
    ),
    "NodeMetricsMissing": AlertCase(
        {
            'up{job="node", instance="n1", partition="train"}': "1x80",
            'dalsegno_node_metrics_timestamp_seconds{instance="n1"}': "60x80",
            'node_textfile_scrape_error{instance="n1"}': "0x80",
        },
        {
            'up{job="node", instance="n1", partition="train"}': "1x80",
            'dalsegno_node_metrics_timestamp_seconds{instance="n1"}': "0+60x80",
            'node_textfile_scrape_error{instance="n1"}': "0x80",
            'up{job="node", instance="head"}': "1x80",  # the head has no node agent
        },
    ),
}
