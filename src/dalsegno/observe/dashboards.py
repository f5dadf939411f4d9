"""The dashboards: cluster, nodes and GPUs, runs and goodput, queue and users, fabric, recovery. Data only.

A test runs every query against a Prometheus that scrapes a local cluster, and asserts that each returns data.
"""

from __future__ import annotations

from dalsegno.observe.panels import Dashboard, GrafanaPanel, PanelKind, PanelQuery, Variable, graph, number

RATE = "$__rate_interval"
NODE = 'instance=~"$node"'
RUN = 'run=~"$run"'
_BUSY = f'1 - avg by (instance) (rate(node_cpu_seconds_total{{mode="idle"}}[{RATE}]))'
_MEMORY = "1 - node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes"
_REAL_DISK = 'fstype!~"tmpfs|ramfs|devtmpfs|squashfs|iso9660|fuse.*"'
_REAL_LINK = 'device!~"lo|veth.*|docker.*|br-.*"'

CLUSTER = Dashboard(
    "dalsegno-cluster",
    "Dal Segno / Cluster",
    (
        number("Nodes", "count(max by (node) (dalsegno_node_state))"),
        number("Nodes down or drained", "sum(slurm_nodes_down) + sum(slurm_nodes_drain) + sum(slurm_nodes_fail)"),
        number("GPUs in use", "sum(slurm_gpus_alloc) / clamp_min(sum(slurm_gpus_total), 1)", unit="percentunit"),
        number("Jobs running", "sum(slurm_queue_running)"),
        number("Jobs pending", "sum(slurm_queue_pending)"),
        number("Alerts firing", 'count(ALERTS{alertstate="firing"}) or vector(0)'),
        graph("Nodes by state", ("sum by (state) (dalsegno_nodes)", "{{state}}"), stacked=True),
        graph("GPUs by use", ("sum by (state) (dalsegno_gpus)", "{{state}}"), stacked=True),
        graph("Jobs by state", ("sum by (state) (dalsegno_jobs)", "{{state}}"), stacked=True),
        graph(
            "GPU utilization",
            ("avg(DCGM_FI_DEV_GPU_UTIL)", "mean"),
            ("max(DCGM_FI_DEV_GPU_UTIL)", "highest"),
            unit="percent",
            largest=100,
        ),
        graph("GPU power", ("sum(DCGM_FI_DEV_POWER_USAGE)", "all GPUs"), unit="watt"),
        graph("CPU use", (f"avg({_BUSY})", "mean"), (f"max({_BUSY})", "highest"), unit="percentunit", largest=1),
        graph(
            "Scheduler",
            ("slurm_scheduler_last_cycle", "last cycle"),
            ("slurm_scheduler_backfill_last_cycle", "last backfill"),
            unit="µs",
        ),
        graph(
            "Exporters",
            ("sum by (job) (up)", "{{job}} answer"),
            ("sum by (source) (dalsegno_collector_success)", "{{source}} collected"),
            about="A failing exporter leaves panels without data. `dalsegno monitor check` names it.",
        ),
        GrafanaPanel("State of each node", (PanelQuery("dalsegno_node_state == 1"),), PanelKind.TABLE),
        GrafanaPanel(
            "Free space",
            (
                PanelQuery(
                    f"min by (instance, mountpoint) (node_filesystem_avail_bytes{{{_REAL_DISK}}})", "{{instance}}"
                ),
            ),
            PanelKind.TABLE,
            unit="bytes",
        ),
    ),
)

_GPU = "{{instance}} GPU {{gpu}}"
_OF_NODE = 'avg by (node) (label_replace(DCGM_FI_DEV_GPU_UTIL, "node", "$1", "instance", "(.*)"))'
NODES = Dashboard(
    "dalsegno-nodes",
    "Dal Segno / Nodes and GPUs",
    (
        graph("GPU utilization", (f"DCGM_FI_DEV_GPU_UTIL{{{NODE}}}", _GPU), unit="percent", largest=100),
        graph(
            "Tensor cores",
            (f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{NODE}}}", _GPU),
            unit="percentunit",
            largest=1,
            about="Share of time in which tensor cores were active. GPUs before Hopper do not report it.",
        ),
        graph(
            "NVLink and PCIe",
            (f"DCGM_FI_PROF_NVLINK_TX_BYTES{{{NODE}}}", f"NVLink, {_GPU}"),
            (f"DCGM_FI_PROF_PCIE_TX_BYTES{{{NODE}}}", f"PCIe, {_GPU}"),
            unit="Bps",
            about="Sent by the GPU. GPUs before Hopper do not report it.",
        ),
        graph("GPU temperature", (f"DCGM_FI_DEV_GPU_TEMP{{{NODE}}}", _GPU), unit="celsius"),
        graph("GPU power", (f"DCGM_FI_DEV_POWER_USAGE{{{NODE}}}", _GPU), unit="watt"),
        graph("GPU memory", (f"DCGM_FI_DEV_FB_USED{{{NODE}}}", _GPU), unit="mbytes"),  # Grafana calls MiB "mbytes"
        graph("SM clock", (f"DCGM_FI_DEV_SM_CLOCK{{{NODE}}} * 1000000", _GPU), unit="hertz"),
        graph(
            "GPU utilization by job",
            (
                f"avg by (job_id, user) (dalsegno_node_job * on (node) group_left () {_OF_NODE})",
                "{{job_id}} of {{user}}",
            ),
            about="Jobs that share a node share its value.",
            unit="percent",
            largest=100,
        ),
        graph(
            "GPU errors",
            (f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{NODE}}}", f"double-bit, {_GPU}"),
            (f"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{{NODE}}}", f"remapped rows, {_GPU}"),
        ),
        graph("Last Xid", (f"DCGM_FI_DEV_XID_ERRORS{{{NODE}}}", _GPU), about="It stays until the next Xid."),
        graph(
            "CPU use",
            (f"{_BUSY.replace('{mode', '{' + NODE + ', mode')}", "{{instance}}"),
            unit="percentunit",
            largest=1,
        ),
        graph(
            "Memory use",
            (f"1 - node_memory_MemAvailable_bytes{{{NODE}}} / node_memory_MemTotal_bytes", "{{instance}}"),
            unit="percentunit",
            largest=1,
        ),
        graph("Load", (f"node_load1{{{NODE}}}", "{{instance}}")),
        graph(
            "Disk reads and writes",
            (f"sum by (instance) (rate(node_disk_read_bytes_total{{{NODE}}}[{RATE}]))", "{{instance}} reads"),
            (f"sum by (instance) (rate(node_disk_written_bytes_total{{{NODE}}}[{RATE}]))", "{{instance}} writes"),
            unit="Bps",
        ),
        graph(
            "Uptime",
            (f"node_time_seconds{{{NODE}}} - node_boot_time_seconds{{{NODE}}}", "{{instance}}"),
            unit="s",
        ),
        graph(
            "Age of GPU and fabric metrics",
            (f"time() - dalsegno_node_metrics_timestamp_seconds{{{NODE}}}", "{{instance}}"),
            unit="s",
        ),
    ),
    (Variable("node", 'label_values(up{job="node"}, instance)'),),
)

_TIME = f"training_time_seconds_total{{{RUN}}}"
RUNS = Dashboard(
    "dalsegno-runs",
    "Dal Segno / Runs and goodput",
    (
        number("Runs", f"count by (phase) (training_run_info{{{RUN}}})", "{{phase}}", width=8),
        number("Goodput", f"training_goodput_ratio{{{RUN}}}", "{{run}}", unit="percentunit", width=8),
        number("Restarts", f"training_restarts_total{{{RUN}}}", "{{run}}", width=8),
        graph("Loss", (f"training_loss{{{RUN}}}", "{{run}}")),
        graph("Step time", (f"training_step_seconds{{{RUN}}}", "{{run}}"), unit="s"),
        graph("Steps", (f"training_step{{{RUN}}}", "{{run}}")),
        graph("Samples per second", (f"training_samples_per_second{{{RUN}}}", "{{run}}")),
        graph("Tokens per second", (f"training_tokens_per_second{{{RUN}}}", "{{run}}")),
        graph("Goodput", (f"training_goodput_ratio{{{RUN}}}", "{{run}}"), unit="percentunit", largest=1),
        graph("Time by kind", (f"sum by (kind) ({_TIME})", "{{kind}}"), unit="s", stacked=True),
        graph(
            "Lost time by cause",
            (f"sum by (reason) (training_badput_seconds_total{{{RUN}}})", "{{reason}}"),
            unit="s",
            stacked=True,
        ),
        graph(
            "Slow ranks",
            (f"topk(10, training_rank_step_ratio{{{RUN}}})", "{{run}} rank {{rank}}"),
            about="The step time of a rank divided by the median of its run. All ranks wait for the slowest.",
        ),
        graph(
            "Generations and lost nodes",
            (f"training_generation{{{RUN}}}", "{{run}} generation"),
            (f"training_lost_nodes_total{{{RUN}}}", "{{run}} lost nodes"),
        ),
        graph(
            "Time since the last step", (f"time() - training_last_step_timestamp_seconds{{{RUN}}}", "{{run}}"), unit="s"
        ),
    ),
    (Variable("run", "label_values(training_run_info, run)"),),
)

PARTITION = 'partition=~"$partition"'
_WAITS = f"sum by (le, partition) (rate(slurm_job_queue_wait_seconds_bucket{{{PARTITION}}}[{RATE}]))"
QUEUE = Dashboard(
    "dalsegno-queue",
    "Dal Segno / Queue and users",
    (
        graph(
            "Pending jobs by reason",
            (f"sum by (reason) (dalsegno_jobs_pending_reason{{{PARTITION}}})", "{{reason}}"),
            stacked=True,
        ),
        graph("Jobs by state", (f"sum by (state) (dalsegno_jobs{{{PARTITION}}})", "{{state}}"), stacked=True),
        graph(
            "Queue wait",
            (f"histogram_quantile(0.5, {_WAITS})", "{{partition}} median"),
            (f"histogram_quantile(0.95, {_WAITS})", "{{partition}} 95 %"),
            unit="s",
            about="Of the jobs that started in each interval.",
        ),
        graph(
            "Jobs started",
            (
                f"sum by (partition) (increase(slurm_job_queue_wait_seconds_count{{{PARTITION}}}[{RATE}]))",
                "{{partition}}",
            ),
        ),
        graph("GPUs by user", ("sum by (user) (dalsegno_user_gpus)", "{{user}}"), stacked=True),
        graph("GPUs by account", ("sum by (account) (dalsegno_account_gpus)", "{{account}}"), stacked=True),
        GrafanaPanel(
            "GPU hours by user",
            (PanelQuery("sum by (user) (increase(dalsegno_gpu_seconds_total[$__range])) / 3600", "{{user}}"),),
            PanelKind.BARS,
            unit="h",
        ),
        GrafanaPanel(
            "GPU hours by account",
            (PanelQuery("sum by (account) (increase(dalsegno_gpu_seconds_total[$__range])) / 3600", "{{account}}"),),
            PanelKind.BARS,
            unit="h",
        ),
        graph(
            "Jobs by user",
            ("sum by (user) (slurm_user_jobs_running)", "{{user}} running"),
            ("sum by (user) (slurm_user_jobs_pending)", "{{user}} pending"),
        ),
        graph(
            "Partitions: CPUs",
            (f"slurm_partition_cpus_allocated{{{PARTITION}}}", "{{partition}} allocated"),
            (f"slurm_partition_cpus_idle{{{PARTITION}}}", "{{partition}} idle"),
        ),
        graph(
            "Scheduler queues",
            ("slurm_scheduler_queue_size", "agent"),
            ("slurm_scheduler_dbd_queue_size", "slurmdbd"),
            ("slurm_scheduler_threads", "threads"),
        ),
        graph("Backfill depth", ("slurm_scheduler_backfill_depth_mean", "mean")),
    ),
    (Variable("partition", "label_values(dalsegno_nodes, partition)"),),
)

_PORT = "{{instance}} {{device}}"


def _efa(title: str, *names: str, unit: str = "Bps") -> GrafanaPanel:
    queries = [
        (f"sum by (instance) (rate(node_amazonefa_{name}{{{NODE}}}[{RATE}]))", f"{{{{instance}}}} {name}")
        for name in names
    ]
    return graph(title, *queries, unit=unit, about="Only on nodes with EFA.")


def _port(title: str, counter: str, factor: str = "", unit: str = "short") -> GrafanaPanel:
    rate = f'rate(dalsegno_fabric_counter{{{NODE}, counter="{counter}"}}[{RATE}])'
    return graph(title, (f"{rate}{factor}", _PORT), unit=unit)


FABRIC = Dashboard(
    "dalsegno-fabric",
    "Dal Segno / Fabric",
    (
        graph("Ports down", (f"sum by (instance) (1 - dalsegno_fabric_port_up{{{NODE}}})", "{{instance}}")),
        graph("Ports up", (f"sum by (instance) (dalsegno_fabric_port_up{{{NODE}}})", "{{instance}}")),
        _port("InfiniBand sent", "port_xmit_data", " * 4", "Bps"),
        _port("InfiniBand received", "port_rcv_data", " * 4", "Bps"),
        _port("Symbol errors", "symbol_error"),
        _port("Links lost", "link_downed"),
        _efa("EFA bytes", "tx_bytes", "rx_bytes"),
        _efa("EFA RDMA", "rdma_read_bytes", "rdma_write_bytes"),
        _efa("EFA packets lost or sent again", "rx_drops", "retrans_bytes", unit="short"),
        graph(
            "Ethernet",
            (
                f"sum by (instance) (rate(node_network_transmit_bytes_total{{{NODE}, {_REAL_LINK}}}[{RATE}]))",
                "{{instance}} sent",
            ),
            (
                f"sum by (instance) (rate(node_network_receive_bytes_total{{{NODE}, {_REAL_LINK}}}[{RATE}]))",
                "{{instance}} received",
            ),
            unit="Bps",
        ),
        graph(
            "Ethernet errors",
            (f"sum by (instance) (rate(node_network_receive_errs_total{{{NODE}}}[{RATE}]))", "{{instance}} received"),
            (f"sum by (instance) (rate(node_network_receive_drop_total{{{NODE}}}[{RATE}]))", "{{instance}} dropped"),
        ),
    ),
    (Variable("node", 'label_values(up{job="node"}, instance)'),),
)


def _quantiles(title: str, name: str) -> GrafanaPanel:
    buckets = f"sum by (le) (rate(dalsegno_recovery_{name}_seconds_bucket[$__range]))"
    return graph(
        title,
        (f"histogram_quantile(0.5, {buckets})", "median"),
        (f"histogram_quantile(0.95, {buckets})", "95 %"),
        unit="s",
    )


RECOVERY = Dashboard(
    "dalsegno-recovery",
    "Dal Segno / Recovery",
    (
        number("Recovery paused", "dalsegno_recovery_paused"),
        number("Spares ready", 'sum(dalsegno_recovery_spares{state="ready"})'),
        number("Spares lent", 'sum(dalsegno_recovery_spares{state="lent"})'),
        number("Failed replacements", "dalsegno_recovery_replacements_failed_total"),
        number("Held back", "sum(dalsegno_recovery_held_back)", about="Nodes with a fault for which nothing is done."),
        number("Budget left", "min(dalsegno_recovery_budget_left)", about="Of the partition with the least."),
        graph("Nodes by phase", ("sum by (phase) (dalsegno_recovery_nodes)", "{{phase}}"), stacked=True),
        graph("Events", (f"sum by (kind) (increase(dalsegno_recovery_events_total[{RATE}]))", "{{kind}}")),
        _quantiles("Time to detect", "detect"),
        _quantiles("Time to drain", "drain"),
        _quantiles("Time to resume training", "resume"),
        _quantiles("Time to replace", "replace"),
        graph("Budget left", ("dalsegno_recovery_budget_left", "{{partition}}")),
        graph("Held back by reason", ("sum by (reason) (dalsegno_recovery_held_back)", "{{reason}}")),
    ),
)

DASHBOARDS = (CLUSTER, NODES, RUNS, QUEUE, FABRIC, RECOVERY)
