"""Render slurm.conf."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dalsegno.hostlist import compress
from dalsegno.slurm import versions
from dalsegno.slurm.layout import Layout
from dalsegno.slurm.render.commands import limited_devices
from dalsegno.slurm.render.lines import Settings, header, line, lines, merged, number, setting, tres, without, yes
from dalsegno.slurm.versions import Version
from dalsegno.spec.facts import Cluster, Node, Partition, Slurm

SPARE_REASON = "dalsegno:spare"
# Lines that `scontrol reconfigure` applies. Any other change in slurm.conf needs a restart of slurmctld and slurmd,
# during which jobs keep running.
RECONFIGURED = re.compile(
    r"^(#|$|PartitionName|(Priority|Scheduler|Preempt)(?!Type)|Slurm(d|ctld)Timeout|MinJobAge|KillWait|MaxJobCount)",
    re.IGNORECASE,
)


def restart_lines(slurm_conf: str) -> list[str]:
    """Return the lines of a slurm.conf that running daemons apply only after a restart."""
    return [line for line in slurm_conf.splitlines() if not RECONFIGURED.match(line)]


def node_lines(cluster: Cluster, layout: Layout) -> str:
    """Return the NodeName lines. Nodes with the same settings share one line."""
    groups: dict[tuple[tuple[str, str], ...], list[Node]] = {}
    for node in cluster.nodes:
        groups.setdefault(tuple(_shape(node, layout).items()), []).append(node)
    return "".join(f"{line(_where(nodes, layout) | dict(shape))}\n" for shape, nodes in groups.items())


def _shape(node: Node, layout: Layout) -> Settings:
    """Return the settings of a node.

    A spare is drained at each start and reconfigure of Slurm, even if it is in use.
    """
    return {
        **_cpus(node, layout),
        "RealMemory": str(node.memory_mib),
        "Gres": _gres(node),
        "Feature": ",".join(node.features),
        "Weight": str(node.weight) if node.weight != 1 else "",
        "State": "DRAIN" if node.spare else "UNKNOWN",
        "Reason": SPARE_REASON if node.spare else "",
    }


def _cpus(node: Node, layout: Layout) -> Settings:
    """Return the CPU settings. Real nodes get only a count, because wrong sockets or threads would drain them."""
    if not layout.overrides:
        return {"CPUs": str(node.cpus)}
    sockets = 2 if node.cpus % 2 == 0 and node.cpus >= 16 else 1
    return {"CPUs": str(node.cpus), "Sockets": str(sockets), "CoresPerSocket": str(node.cpus // sockets)}


def _gres(node: Node) -> str:
    if not node.gpus:
        return ""
    return ":".join(part for part in (node.gres, node.gpu_type, str(node.gpus)) if part)


def _where(nodes: Sequence[Node], layout: Layout) -> Settings:
    places = [layout.place(node.name) for node in nodes]
    return {
        "NodeName": compress(node.name for node in nodes),
        "NodeHostname": _one_or_each([place.hostname for place in places]),
        "NodeAddr": _one_or_each([place.address for place in places]),
        "Port": _ports([place.port or layout.slurmd_port for place in places]),
    }


def _one_or_each(values: Sequence[str]) -> str:
    """Return one value for all nodes on a line, or one value per node. Slurm accepts no other form."""
    return values[0] if len(set(values)) == 1 else compress(values)


def _ports(ports: Sequence[int]) -> str:
    listed = _one_or_each([str(port) for port in ports])
    return f"[{listed}]" if "," in listed and not listed.startswith("[") else listed


_MEMORY_DEFAULTS = ("DefMemPerCPU", "DefMemPerNode", "DefMemPerGPU")


def partition_lines(cluster: Cluster) -> str:
    nodes = {node.name: node for node in cluster.nodes}
    return "".join(f"{line(_partition(partition, cluster, nodes))}\n" for partition in cluster.partitions)


def _partition(partition: Partition, cluster: Cluster, nodes: dict[str, Node]) -> Settings:
    members = [nodes[name] for name in partition.nodes if name in nodes]
    policy = _partition_fields(partition)
    ours = {
        "PartitionName": partition.name,
        "Nodes": compress(partition.nodes),
        **policy,
        "MaxTime": policy["MaxTime"] or "INFINITE",
        **_shares(members, cluster),
        "State": "UP",
    }
    if _sets_memory(partition.extra):
        ours = without(ours, _MEMORY_DEFAULTS)
    return merged(ours, partition.extra)


def _partition_fields(partition: Partition) -> Settings:
    """Return the settings that the fields of a partition stand for; "" for Slurm's default."""
    return {
        "Default": yes(partition.default),
        "MaxTime": number(partition.time_limit_min),
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
    }


def partition_policy(partition: Partition) -> Settings:
    """Return a partition's settings from the cluster file, except its nodes, under slurm.conf's names."""
    return {key: value for key, value in merged(_partition_fields(partition), partition.extra).items() if value}


def _shares(members: list[Node], cluster: Cluster) -> Settings:
    """Return the defaults for jobs: memory in proportion to CPUs, and CPUs in proportion to GPUs.

    Slurm has no default of CPUs for Trainium devices. Its own default of memory is all memory of the node, so that even
    the smallest job would fill the node.
    """
    if not members:
        return {}
    per_gpu = min((node.cpus // node.gpus for node in members if node.gpus and node.gres == "gpu"), default=0)
    shares = {"DefCpuPerGPU": str(per_gpu) if per_gpu else ""}
    if not _sets_memory(cluster.slurm.extra):
        shares["DefMemPerCPU"] = str(max(1, min(node.memory_mib // max(1, node.cpus) for node in members)))
    return shares


def _sets_memory(extra: Mapping[str, str]) -> bool:
    """Return whether the user set one of Slurm's three memory defaults, which are mutually exclusive."""
    return not {key.lower() for key in extra}.isdisjoint(key.lower() for key in _MEMORY_DEFAULTS)


def policy(cluster: Cluster, layout: Layout, slurm: Version) -> Settings:
    """Return the settings for selection, scheduling, priority, preemption and accounting."""
    return {
        **_nodes(cluster, layout),
        **_scheduling(cluster, layout),
        **_priority(cluster.slurm),
        **_preemption(cluster),
        **_accounting(cluster, layout, slurm),
    }


def _nodes(cluster: Cluster, layout: Layout) -> Settings:
    return {
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "GresTypes": ",".join(sorted({node.gres for node in cluster.nodes if node.gpus})),
        "SlurmdParameters": "config_overrides" if layout.overrides else "",
        "ProctrackType": f"proctrack/{layout.proctrack}",
        "TaskPlugin": layout.task_plugin,
        "MpiDefault": "none",
        # A node that was out of service must not return before it is validated.
        "ReturnToService": "0",
        # GPUDirect and RDMA pin memory, so the memlock limit of the submitting shell must not apply on the node.
        "PropagateResourceLimitsExcept": "MEMLOCK",
        "TopologyPlugin": "topology/tree" if cluster.slurm.topology else "",
    }


def _scheduling(cluster: Cluster, layout: Layout) -> Settings:
    # Our prologs fail for faults of the node. By default, Slurm would hold the requeued job until somebody releases it.
    nohold = ["nohold_on_prolog_fail"] if layout.programs.prolog else []
    return {
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": ",".join([*_scheduler_parameters(len(cluster.nodes)), *nohold]),
        # A job that no partition can ever run is refused at submission instead of pending forever.
        "EnforcePartLimits": "ANY",
    }


def _scheduler_parameters(nodes: int) -> list[str]:
    """Return scheduling intervals: short for small clusters, where a pass is cheap, and longer for large clusters.

    Backfill never has the shorter interval, so that the main scheduler starts most jobs: a job that backfill started is
    not in slurmctld's saved state until the next event, and is lost if slurmctld is killed before that (seen on 22.05).
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
    # The gang scheduler resumes suspended jobs, so Slurm refuses SUSPEND in any partition unless GANG is set here.
    gang = ",GANG" if suspends and "GANG" not in mode else ""
    exempt_s = slurm.preempt_exempt_time_s
    return {
        "PreemptType": _PREEMPT_TYPES.get(slurm.preempt_by, slurm.preempt_by),
        "PreemptMode": mode + gang,
        "PreemptExemptTime": "" if exempt_s is None else duration(exempt_s),
    }


def duration(seconds: int) -> str:
    """Return `90061` as `1-01:01:01`, the only one of Slurm's formats that cannot be mistaken for minutes."""
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
        # Connections to slurmdbd use this socket, not the one in AuthInfo.
        "AccountingStoragePass": layout.paths.munge_socket,
        "AccountingStorageTRES": _tracked(cluster),
        "AccountingStorageEnforce": ",".join(cluster.slurm.enforce),
        **_store_comments(slurm),
    }


def _tracked(cluster: Cluster) -> str:
    """Return the devices that accounting counts, with and without their types."""
    types = {f"{node.gres}:{node.gpu_type}" for node in cluster.nodes if node.gpus and node.gpu_type}
    return ",".join(f"gres/{each}" for each in (*limited_devices(cluster), *sorted(types)))


def _store_comments(slurm: Version) -> Settings:
    if versions.STORE_FLAGS.holds(slurm):
        return {"AccountingStoreFlags": "job_comment"}
    return {"AccountingStoreJobComment": "YES"}


def render_slurm_conf(cluster: Cluster, layout: Layout, slurm: Version) -> str:
    """Render slurm.conf, which is the same for all daemons and commands. The user's raw settings override ours."""
    versions.check_settings(cluster.slurm.extra, slurm)
    settings = merged(_daemons(cluster, layout) | policy(cluster, layout, slurm), cluster.slurm.extra)
    return "".join(
        [
            header("slurm.conf", cluster.name, layout.spec),
            _controllers(layout),
            lines(settings),
            "\n",
            node_lines(cluster, layout),
            _submit_hosts(layout, slurm),
            partition_lines(cluster),
        ]
    )


def _controllers(layout: Layout) -> str:
    return "".join(
        setting("SlurmctldHost", f"{host.name}({host.address})" if host.address else host.name) + "\n"
        for host in layout.controllers
    )


def _submit_hosts(layout: Layout, slurm: Version) -> str:
    """Return node lines for hosts that run srun but are not nodes.

    In some releases, slurmctld looks up srun's host only among the nodes. For any other host, it connects to 0.0.0.0,
    and a step that waits for another step starts two minutes late. A FUTURE node is not shown and gets no jobs.
    """
    if not versions.CALLS_ONLY_NODES.holds(slurm):
        return ""
    return "".join(
        line({"NodeName": name, "NodeAddr": address, "CPUs": "1", "State": "FUTURE"}) + "\n"
        for name, address in layout.submit_hosts.items()
    )


def _daemons(cluster: Cluster, layout: Layout) -> Settings:
    """Return the users, ports, files, programs and timeouts of the daemons."""
    return {
        "ClusterName": cluster.name,
        "SlurmUser": layout.slurm_user,
        "SlurmdUser": layout.slurmd_user,
        "SlurmctldPort": str(layout.slurmctld_port),
        "SlurmdPort": str(layout.slurmd_port),
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny" if layout.own_address_only else "",
        "AuthType": "auth/munge",
        "AuthInfo": _auth_info(layout),
        **_files(layout),
        **_programs(layout),
        **_timeouts(cluster, layout),
    }


def _auth_info(layout: Layout) -> str:
    socket, lifetime = layout.paths.munge_socket, layout.timeouts.credential_s
    return ",".join([f"socket={socket}"] * bool(socket) + [f"cred_expire={lifetime}"] * (lifetime is not None))


def _files(layout: Layout) -> Settings:
    paths = layout.paths
    return {
        "StateSaveLocation": paths.state_save_dir,
        "SlurmctldLogFile": paths.slurmctld_log,
        "SlurmctldPidFile": paths.slurmctld_pid,
        "SlurmdSpoolDir": paths.slurmd_spool_dir,
        "TmpFS": paths.tmp_dir,
        "SlurmdLogFile": paths.slurmd_log,
        "SlurmdPidFile": paths.slurmd_pid,
    }


def _programs(layout: Layout) -> Settings:
    programs = layout.programs
    every = str(programs.health_check_interval_s) if programs.health_check else ""
    return {
        "Prolog": programs.prolog,
        "Epilog": programs.epilog,
        "TaskProlog": programs.task_prolog,
        "PrologFlags": "Contain" if programs.contain else "",
        "HealthCheckProgram": programs.health_check,
        "HealthCheckInterval": every,
        "HealthCheckNodeState": "ANY" if programs.health_check else "",
        "MailProg": programs.mail,
        "PlugStackConfig": layout.spank.conf if layout.spank else "",
    }


def _timeouts(cluster: Cluster, layout: Layout) -> Settings:
    times = layout.timeouts
    takeover_s = times.slurmctld_s or (5 if len(layout.controllers) > 1 else None)
    named = {
        "SlurmctldTimeout": takeover_s,
        "SlurmdTimeout": cluster.slurm.slurmd_timeout_s,
        "MessageTimeout": times.message_s,
        "KillWait": times.kill_wait_s,
        "MinJobAge": times.min_job_age_s,
        "TreeWidth": layout.tree_width,
    }
    return {key: str(value) for key, value in named.items() if value is not None}
