"""Resolve a cluster file into facts: look up names, expand counts, and fill in defaults."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from dalsegno.spec import facts
from dalsegno.spec.health import CheckSpec
from dalsegno.spec.layout import login_nodes, members, own_nodes, own_spares, size_of
from dalsegno.spec.model import ClusterSpec, PartitionSpec, StorageSpec, UserSpec
from dalsegno.spec.resolve_aws import resolve_parallelcluster
from dalsegno.spec.resolve_platform import resolve_hyperpod, resolve_oci
from dalsegno.spec.slurm import Preemption, PrioritySpec, QosSpec, ReservationSpec, SlurmSpec, Topology
from dalsegno.spec.targets import Ssh, hosts_of, power_cycle_argv


def resolve_slurm(spec: ClusterSpec) -> facts.Slurm:
    """Return the cluster-wide Slurm policy."""
    slurm = spec.slurm
    preemption = _preemption(slurm)
    accounting = has_accounting(spec)
    return facts.Slurm(
        accounting=accounting,
        enforce=tuple(slurm.enforce),
        rest=slurm.rest,
        backup_controller=slurm.backup_controller,
        priority=_priority(slurm.priority, accounting),
        preempt_by=preemption.by if preemption else "",
        preempt_mode=preemption.mode if preemption else "",
        preempt_exempt_time_s=preemption.exempt_time if preemption else None,
        topology=_topology(slurm.topology, spec.partitions),
        qos=tuple(_qos(each) for each in slurm.qos),
        slurmd_timeout_s=slurm.slurmd_timeout,
        extra=dict(slurm.extra),
    )


def has_accounting(spec: ClusterSpec) -> bool:
    """Return whether the cluster has accounting. On ParallelCluster, accounting needs a database of the user's own.
    HyperPod has no accounting."""
    if spec.target == "hyperpod":
        return False
    return spec.slurm.accounting and (spec.parallelcluster is None or spec.parallelcluster.database is not None)


def _preemption(slurm: SlurmSpec) -> Preemption | None:
    """Return the preemption settings. A QOS that preempts another turns preemption on."""
    if slurm.preemption is None and any(qos.preempts for qos in slurm.qos):
        return Preemption()
    return slurm.preemption


def _priority(priority: PrioritySpec, accounting: bool) -> facts.Priority:
    found = facts.Priority(
        age=priority.age,
        fair_share=priority.fair_share,
        job_size=priority.job_size,
        partition=priority.partition,
        qos=priority.qos,
        tres=dict(priority.tres),
        half_life_min=priority.half_life,
        usage_reset=priority.usage_reset,
        calc_period_min=priority.calc_period,
        max_age_min=priority.max_age,
        favor_small=priority.favor_small,
    )
    # The factors for fair share and QOS need the database. Without it, Slurm would log an error for every job.
    return found if accounting else replace(found, fair_share=0, qos=0)


def _qos(qos: QosSpec) -> facts.Qos:
    return facts.Qos(
        name=qos.name,
        priority=qos.priority,
        preempts=tuple(qos.preempts),
        preempt_mode=qos.preempt_mode,
        max_time_min=qos.max_time,
        max_tres_per_user=dict(qos.max_tres_per_user),
        max_jobs_per_user=qos.max_jobs_per_user,
        group_tres=dict(qos.group_tres),
        usage_factor=qos.usage_factor,
    )


def _topology(topology: Topology | None, partitions: Sequence[PartitionSpec]) -> tuple[facts.Switch, ...]:
    if topology is None:
        return ()
    if topology.nodes_per_switch:
        return _build_topology(partitions, topology.nodes_per_switch)
    return tuple(facts.Switch(each.name, tuple(each.nodes), tuple(each.switches)) for each in topology.switches)


def _build_topology(partitions: Sequence[PartitionSpec], per_switch: int) -> tuple[facts.Switch, ...]:
    """Return leaf switches, each with nodes of a single partition, and a spine switch if there are several leaves."""
    leaves: list[facts.Switch] = []
    for partition in partitions:
        names = own_nodes(partition) + own_spares(partition)
        for at in range(0, len(names), per_switch):
            leaves.append(facts.Switch(f"leaf-{len(leaves) + 1}", nodes=tuple(names[at : at + per_switch])))
    spine = facts.Switch("spine", switches=tuple(leaf.name for leaf in leaves))
    return (*leaves, spine) if len(leaves) > 1 else tuple(leaves)


def resolve(spec: ClusterSpec) -> facts.Cluster:
    """Return the facts from a valid cluster file."""
    return facts.Cluster(
        name=spec.name,
        target=spec.target,
        platform=spec.existing.platform if spec.existing else "",
        nodes=_all_nodes(spec),
        partitions=_partitions(spec),
        head=spec.head.name,
        logins=tuple(login_nodes(spec)),
        slurm=resolve_slurm(spec),
        accounts=_accounts(spec),
        users=_users(spec),
        groups=tuple(facts.Group(group.name, group.gid) for group in spec.groups),
        directory=facts.Directory(spec.directory.kind == "ldap", spec.directory.base),
        reservations=tuple(_reservation(each) for each in spec.reservations),
        storage=tuple(_storage(each) for each in spec.storage),
        local=_local(spec),
        ssh=_ssh(spec) if spec.target == "ssh" else facts.SshAccess(),
        health=_health(spec),
        containers=_containers(spec),
        monitoring=_monitoring(spec),
        hyperpod=resolve_hyperpod(spec),
        oci=resolve_oci(spec),
        parallelcluster=resolve_parallelcluster(spec, spec.parallelcluster) if spec.parallelcluster else None,
    )


def _containers(spec: ClusterSpec) -> facts.Containers:
    own = spec.containers
    enabled = True if own.enabled is None and own.images else own.enabled  # a list of images turns containers on
    return facts.Containers(enabled, str(own.folder or ""), tuple(dict.fromkeys(own.images)))


def _monitoring(spec: ClusterSpec) -> facts.Monitoring:
    own, alerts = spec.monitoring, spec.monitoring.alerts
    write = own.remote_write
    return facts.Monitoring(
        enabled=own.enabled,
        compat=own.compat,
        open_metrics=own.open_metrics,
        interval_s=own.interval,
        prometheus=own.prometheus,
        retention_s=own.retention,
        email=tuple(
            facts.EmailAlerts(
                tuple(each.to), each.sender, each.smarthost, each.user, each.password_file or "", each.require_tls
            )
            for each in alerts.email
        ),
        slack=tuple(facts.SlackAlerts(each.url_file, each.channel) for each in alerts.slack),
        webhook=tuple(facts.WebhookAlerts(each.url or "", each.url_file or "") for each in alerts.webhook),
        gpu_hour_price=own.gpu_hour_price,
        remote_write=facts.RemoteWrite(write.url, write.region, write.role_arn or "") if write else None,
    )


def _all_nodes(spec: ClusterSpec) -> tuple[facts.Node, ...]:
    """Return each node once, with the size from the first partition that has it.

    In an existing cluster, several partitions may name the same node.
    """
    named: dict[str, facts.Node] = {}
    for partition in spec.partitions:
        for node in _nodes(partition, spec.target):
            named.setdefault(node.name, node)
    return tuple(named.values())


def _nodes(partition: PartitionSpec, target: str) -> list[facts.Node]:
    if partition.nodes_from:
        return []
    size = size_of(partition, target)
    spares = own_spares(partition)
    return [
        facts.Node(
            name=name,
            cpus=size.cpus,
            memory_mib=size.memory_mib,
            gpus=size.gpus,
            gpu_type=size.gpu_type,
            gpu_memory_mib=size.gpu_memory_mib,
            gres=size.gres,
            instance=size.instance,
            features=tuple(partition.features),
            weight=partition.weight,
            spare=spare,
        )
        for names, spare in ((own_nodes(partition), False), (spares, True))
        for name in names
    ]


def _partitions(spec: ClusterSpec) -> tuple[facts.Partition, ...]:
    held = members(spec)
    # Jobs that name no partition go to the first one, unless the file sets another default.
    default = next((each.name for each in spec.partitions if each.default), spec.partitions[0].name)
    return tuple(_partition(each, held[each.name], each.name == default) for each in spec.partitions)


def _partition(partition: PartitionSpec, nodes: list[str], default: bool) -> facts.Partition:
    tier, factor = partition.priority_tier, partition.priority_job_factor
    return facts.Partition(
        name=partition.name,
        nodes=tuple(nodes),
        default=default,
        time_limit_min=partition.time_limit,
        default_time_min=partition.default_time,
        max_nodes=partition.max_nodes,
        min_nodes=partition.min_nodes,
        priority_tier=partition.priority if tier is None else tier,
        priority_factor=partition.priority if factor is None else factor,
        oversubscribe=partition.oversubscribe,
        allow_accounts=tuple(partition.allow_accounts),
        allow_groups=tuple(partition.allow_groups),
        allow_qos=tuple(partition.allow_qos),
        preempt_mode=partition.preempt_mode,
        hidden=partition.hidden,
        extra=dict(partition.extra),
    )


def _accounts(spec: ClusterSpec) -> tuple[facts.Account, ...]:
    found = [
        facts.Account(
            name=account.name,
            parent=account.parent,
            fair_share=account.fair_share,
            qos=tuple(account.qos),
            group_tres=dict(account.group_tres),
            description=account.description,
        )
        for account in spec.accounts
    ]
    without_account = any(not user.accounts for user in spec.users)
    if has_accounting(spec) and without_account and all(each.name != facts.DEFAULT_ACCOUNT for each in found):
        found.append(facts.Account(facts.DEFAULT_ACCOUNT, description="users without an account of their own"))
    return tuple(found)


def _users(spec: ClusterSpec) -> tuple[facts.User, ...]:
    return tuple(resolve_user(user, has_accounting(spec)) for user in spec.users)


def resolve_user(user: UserSpec, accounting: bool) -> facts.User:
    """Return the facts about a user."""
    accounts = tuple(user.accounts) or ((facts.DEFAULT_ACCOUNT,) if accounting else ())
    return facts.User(
        name=user.name,
        accounts=accounts,
        default_account=user.default_account or next(iter(accounts), ""),
        uid=user.uid,
        fair_share=user.fair_share,
        qos=tuple(user.qos),
        default_qos=user.default_qos,
        admin=user.admin,
        groups=tuple(dict.fromkeys(user.groups)),
        allow_privileged=tuple(user.allow_privileged),
        ssh_keys=tuple(dict.fromkeys(user.ssh_keys)),
        full_name=user.full_name,
        max_gpus=user.max_gpus,
    )


def _reservation(reservation: ReservationSpec) -> facts.Reservation:
    return facts.Reservation(
        name=reservation.name,
        nodes=tuple(reservation.nodes),
        node_count=reservation.node_count,
        partition=reservation.partition,
        start=reservation.start,
        duration_min=reservation.duration,
        users=tuple(reservation.users),
        accounts=tuple(reservation.accounts),
        flags=tuple(reservation.flags),
    )


def _storage(storage: StorageSpec) -> facts.Storage:
    return facts.Storage(
        name=storage.name,
        mount=storage.mount,
        type=storage.type,
        source=storage.source,
        size_mib=storage.size,
        options=storage.options,
        throughput_mb_per_s_per_tib=storage.throughput,
        home=storage.home,
        required=storage.required,
        min_mb_per_s=storage.min_mb_per_s,
        min_files_per_s=storage.min_files_per_s,
    )


def _local(spec: ClusterSpec) -> facts.Local:
    if spec.local is None:
        return facts.Local()
    return facts.Local(hosts=spec.local.hosts, gpus=spec.local.gpus, subnet=spec.local.subnet, cloud=spec.local.cloud)


def _ssh(spec: ClusterSpec) -> facts.SshAccess:
    """Return how to reach each machine over SSH, the head node first."""
    ssh = spec.ssh or Ssh()
    nodes = [name for partition in spec.partitions for name in (*own_nodes(partition), *own_spares(partition))]
    found = hosts_of(ssh, dict.fromkeys([spec.head.name, *login_nodes(spec), *nodes]))
    hosts = [
        facts.SshHost(
            name,
            host.address,
            host.user or "",
            host.port,
            _expanded(host.key),
            host.jump or "",
            tuple(power_cycle_argv(name, host)),
        )
        for name, host in found.items()
    ]
    files = (_expanded(ssh.known_hosts), _expanded(ssh.sudo_password_file))
    return facts.SshAccess(
        tuple(hosts),
        *files,
        tuple(ssh.packages),
        tuple(ssh.slurm_packages),
        ssh.slurm_version or "",
        ssh.logins_need_job,
    )


def _expanded(path: str | None) -> str:
    return os.path.expanduser(path or "")


def _health(spec: ClusterSpec) -> facts.Health:
    health = spec.health
    return facts.Health(
        mode=health.mode,
        armed=tuple(health.armed),
        max_out=health.max_out,
        per_hour=health.per_hour,
        reboots_per_fault=health.reboots.per_fault,
        reboots_per_day=health.reboots.per_day,
        reboots_apart_s=health.reboots.apart,
        checks={name: _check(check) for name, check in health.checks.items()},
    )


def _check(check: CheckSpec) -> facts.CheckSetting:
    return facts.CheckSetting(check.enabled, check.every, check.action or "", dict(check.thresholds))
