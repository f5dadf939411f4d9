"""Render cluster.yaml for ParallelCluster 3.16 from a resolved cluster and the ids of its prerequisites. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from dalsegno.hardware import instances
from dalsegno.slurm.render.lines import tres
from dalsegno.spec.aws_facts import PclusterSettings, SlurmQueue
from dalsegno.spec.facts import Cluster, Node, Partition, Priority, Slurm, Storage
from dalsegno.targets.parallelcluster.prerequisites import Prerequisites, scripts_prefix, settings_of

SSM_POLICY = "AmazonSSMManagedInstanceCore"
NOBODY = "127.0.0.1/32"  # without an SSH key or without `allowed_ips`, no address may reach sshd on the head node
Tree = dict[str, Any]


def render_config(cluster: Cluster, known: Prerequisites) -> Tree:
    """Return the content of cluster.yaml as a tree."""
    own = settings_of(cluster)
    config: Tree = {
        "Region": own.region,
        "Image": {"Os": own.os, **({"CustomAmi": own.ami} if own.ami else {})},
        "HeadNode": _head(cluster, own, known),
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": _slurm_settings(cluster, own),
            "SlurmQueues": [_queue(cluster, own, queue, known) for queue in _default_first(cluster, own)],
        },
    }
    if own.login_count:
        config["LoginNodes"] = {"Pools": [_login(cluster, own, known)]}
    if storage := [_storage(each, known) for each in cluster.storage if each.type != "scratch"]:
        config["SharedStorage"] = storage
    if own.directory:
        config["DirectoryService"] = _directory(own)
    tags = {**own.tags, "dalsegno:cluster": cluster.name}
    config["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
    return config


def config_text(cluster: Cluster, config: Tree) -> str:
    """Return the text of cluster.yaml. Its first line says which program wrote it."""
    import yaml

    head = f"# Written by Dal Segno for cluster {cluster.name}. Change the cluster file, then run `dalsegno up`.\n"
    return head + yaml.safe_dump(config, sort_keys=False, allow_unicode=False, width=120)


def partition_of(region: str) -> str:
    """Return the AWS partition of a region, which is a part of every ARN."""
    return "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"


def _policies(own: PclusterSettings, known: Prerequisites, *, head: bool) -> list[Tree]:
    ssm = f"arn:{partition_of(own.region)}:iam::aws:policy/{SSM_POLICY}"
    names = [*([ssm] if head else []), *([known.policy] if known.policy else []), *own.policies]
    return [{"Policy": name} for name in dict.fromkeys(names)]


def _head(cluster: Cluster, own: PclusterSettings, known: Prerequisites) -> Tree:
    ssh: Tree = {"AllowedIps": own.allowed_ips if own.key and own.allowed_ips else NOBODY}
    if own.key:
        ssh = {"KeyName": own.key, **ssh}
    return {
        "InstanceType": own.head_instance,
        "Networking": _networking({"SubnetId": known.head_subnet}, known.security_groups),
        "Ssh": ssh,
        "LocalStorage": {"RootVolume": {"Size": own.head_root_volume_gib, "DeleteOnTermination": True}},
        "Iam": {"AdditionalIamPolicies": _policies(own, known, head=True)},
        "Imds": {"Secured": True},
        "CustomActions": _actions(cluster, own, known, "head"),
    }


def _networking(start: Tree, groups: Iterable[str]) -> Tree:
    found = list(dict.fromkeys(groups))
    return {**start, **({"AdditionalSecurityGroups": found} if found else {})}


_EVENTS = {"start": "OnNodeStart", "configured": "OnNodeConfigured", "updated": "OnNodeUpdated"}


def script_uri(cluster: str, bucket: str, machine: str) -> str:
    """Return the address of the bootstrap script for the head, for login nodes or for compute nodes.

    The address stays the same when our code changes, because ParallelCluster refuses a new address for the head node of
    a running cluster.
    """
    return f"s3://{bucket}/{scripts_prefix(cluster)}{machine}.sh"


def _actions(cluster: Cluster, own: PclusterSettings, known: Prerequisites, machine: str) -> Tree:
    """Return the custom actions of a machine: first the user's scripts, then ours."""
    found: Tree = {}
    for at, event in _EVENTS.items():
        scripts = [
            {"Script": each.script, **({"Args": list(each.args)} if each.args else {})}
            for each in own.actions
            if each.on in (machine, "all") and each.at == at and (at != "updated" or machine == "head")
        ]
        if at == "configured" or (at == "updated" and machine == "head"):
            scripts.append({"Script": script_uri(cluster.name, known.bucket, machine)})
        if scripts:
            found[event] = {"Sequence": scripts}
    return found


def _slurm_settings(cluster: Cluster, own: PclusterSettings) -> Tree:
    settings: Tree = {"ScaledownIdletime": own.scaledown_idletime_min, "QueueUpdateStrategy": own.queue_update}
    if own.database:
        settings["Database"] = {
            "Uri": own.database.uri,
            "UserName": own.database.user,
            "PasswordSecretArn": own.database.password_secret,
        }
    if custom := [{name: value} for name, value in custom_settings(cluster).items()]:
        settings["CustomSlurmSettings"] = custom
    return settings


def custom_settings(cluster: Cluster) -> dict[str, str]:
    """Return the settings of slurm.conf that the cluster file implies and that ParallelCluster does not write
    itself."""
    slurm = cluster.slurm
    found = _priority(slurm)
    if slurm.enforce and slurm.accounting:
        found["AccountingStorageEnforce"] = ",".join(slurm.enforce)
    if slurm.preempt_by:
        kind = {"qos": "preempt/qos", "partition": "preempt/partition_prio"}[slurm.preempt_by]
        found |= {"PreemptType": kind, "PreemptMode": slurm.preempt_mode or "REQUEUE"}
        if slurm.preempt_exempt_time_s is not None:
            found["PreemptExemptTime"] = _time(slurm.preempt_exempt_time_s // 60)
    return {**found, **slurm.extra}


def _priority(slurm: Slurm) -> dict[str, str]:
    """Return the settings for job priority; none if the cluster has no accounting and the file sets no priority."""
    priority, default = slurm.priority, Priority()
    if not slurm.accounting and priority == replace(default, fair_share=0, qos=0):
        return {}
    found = {
        "PriorityType": "priority/multifactor",
        "PriorityWeightAge": str(priority.age),
        "PriorityWeightFairshare": str(priority.fair_share),
        "PriorityWeightJobSize": str(priority.job_size),
        "PriorityWeightPartition": str(priority.partition),
        "PriorityWeightQOS": str(priority.qos),
    }
    further = {  # our defaults are Slurm's, so they are written only if the file has others
        "PriorityWeightTRES": (priority.tres, default.tres, tres(priority.tres)),
        "PriorityDecayHalfLife": (priority.half_life_min, default.half_life_min, _time(priority.half_life_min)),
        "PriorityUsageResetPeriod": (priority.usage_reset, default.usage_reset, priority.usage_reset),
        "PriorityCalcPeriod": (priority.calc_period_min, default.calc_period_min, _time(priority.calc_period_min)),
        "PriorityMaxAge": (priority.max_age_min, default.max_age_min, _time(priority.max_age_min)),
        "PriorityFavorSmall": (priority.favor_small, default.favor_small, "YES" if priority.favor_small else "NO"),
    }
    return found | {name: text for name, (value, usual, text) in further.items() if value != usual}


def _time(minutes: int) -> str:
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00"


def _default_first(cluster: Cluster, own: PclusterSettings) -> list[SlurmQueue]:
    """Return the queues in the order of the file, but with the default queue first, where ParallelCluster expects
    it."""
    default = {partition.name for partition in cluster.partitions if partition.default}
    return sorted(own.queues, key=lambda queue: queue.name not in default)


def _queue(cluster: Cluster, own: PclusterSettings, queue: SlurmQueue, known: Prerequisites) -> Tree:
    partition = next(each for each in cluster.partitions if each.name == queue.name)
    scratch = next((each.mount for each in cluster.storage if each.type == "scratch"), "")
    groups = (*known.security_groups, *queue.security_groups)
    subnets = list(queue.subnets or known.compute_subnets)
    group: Tree = {"Enabled": queue.placement_group}
    if queue.placement_group_name:
        group["Name"] = queue.placement_group_name
    found: Tree = {
        "Name": queue.name,
        "CapacityType": queue.capacity_type,
        "Networking": _networking({"SubnetIds": subnets, "PlacementGroup": group}, groups),
        "ComputeSettings": {
            "LocalStorage": {
                "RootVolume": {"Size": queue.root_volume_gib},
                **({"EphemeralVolume": {"MountDir": scratch}} if scratch else {}),
            }
        },
        "ComputeResources": [_compute_resource(queue)],
        "HealthChecks": {"Gpu": {"Enabled": own.gpu_health_checks}},
        "CustomActions": _actions(cluster, own, known, "compute"),
    }
    if queue.ami:
        found["Image"] = {"CustomAmi": queue.ami}
    if policies := _policies(own, known, head=False):
        found["Iam"] = {"AdditionalIamPolicies": policies}
    if settings := partition_settings(partition):
        found["CustomSlurmSettings"] = settings
    return found


def _compute_resource(queue: SlurmQueue) -> Tree:
    types: Tree = (
        {"InstanceType": queue.instances[0]}
        if len(queue.instances) == 1
        else {"Instances": [{"InstanceType": name} for name in queue.instances]}
    )
    found: Tree = {
        "Name": queue.name,
        **types,
        "MinCount": queue.min_count,
        "MaxCount": queue.max_count,
        "Efa": {"Enabled": queue.efa},
    }
    if queue.capacity_reservation:
        found["CapacityReservationTarget"] = {"CapacityReservationId": queue.capacity_reservation}
    if queue.spot_price is not None:
        found["SpotPrice"] = queue.spot_price
    return found


def partition_settings(partition: Partition) -> dict[str, str]:
    """Return the settings of a partition, under the names of slurm.conf."""
    lists = {
        "AllowAccounts": ",".join(partition.allow_accounts),
        "AllowGroups": ",".join(partition.allow_groups),
        "AllowQos": ",".join(partition.allow_qos),
    }
    values: dict[str, object] = {
        "MaxTime": None if partition.time_limit_min is None else _time(partition.time_limit_min),
        "DefaultTime": None if partition.default_time_min is None else _time(partition.default_time_min),
        "MaxNodes": partition.max_nodes,
        "MinNodes": partition.min_nodes,
        "PriorityTier": partition.priority_tier,
        "PriorityJobFactor": partition.priority_factor,
        "PreemptMode": partition.preempt_mode or None,
        "Hidden": "YES" if partition.hidden else None,
    }
    found = {name: str(value) for name, value in values.items() if value is not None}
    return {**found, **{name: text for name, text in lists.items() if text}, **partition.extra}


def _login(cluster: Cluster, own: PclusterSettings, known: Prerequisites) -> Tree:
    found: Tree = {
        "Name": "login",
        "InstanceType": own.login_instance,
        "Count": own.login_count,
        "Networking": _networking({"SubnetIds": [known.head_subnet]}, known.security_groups),
        "CustomActions": _actions(cluster, own, known, "login"),
        "Iam": {"AdditionalIamPolicies": _policies(own, known, head=True)},
    }
    if own.key and own.allowed_ips:
        found["Ssh"] = {"AllowedIps": own.allowed_ips}
    return found


def _storage(storage: Storage, known: Prerequisites) -> Tree:
    found: Tree = {"Name": storage.name, "MountDir": storage.mount}
    source, gib = known.storage.get(storage.name, storage.source), (storage.size_mib or 0) // 1024
    if storage.type == "lustre":
        return {**found, "StorageType": "FsxLustre", "FsxLustreSettings": {"FileSystemId": source}}
    if storage.type == "openzfs":
        return {**found, "StorageType": "FsxOpenZfs", "FsxOpenZfsSettings": {"VolumeId": source}}
    if storage.type == "efs":
        settings: Tree = {"FileSystemId": source} if source else {"Encrypted": True, "DeletionPolicy": "Retain"}
        return {**found, "StorageType": "Efs", "EfsSettings": settings}
    settings = {"VolumeId": source} if source else {"Size": gib, "VolumeType": "gp3", "DeletionPolicy": "Retain"}
    return {**found, "StorageType": "Ebs", "EbsSettings": settings}


def _directory(own: PclusterSettings) -> Tree:
    assert own.directory is not None
    directory = own.directory
    found: Tree = {
        "DomainName": directory.domain,
        "DomainAddr": directory.address,
        "PasswordSecretArn": directory.password_secret,
        "DomainReadOnlyUser": directory.reader,
        "GenerateSshKeysForUsers": directory.create_ssh_keys,
    }
    if directory.ca_certificate:
        found |= {"LdapTlsCaCert": directory.ca_certificate, "LdapTlsReqCert": "hard"}
    if directory.access_filter:
        found["LdapAccessFilter"] = directory.access_filter
    return found


# Node names


def node_names(queue: SlurmQueue) -> tuple[list[str], list[str]]:
    """Return two lists: the names that ParallelCluster gives the static nodes of a queue, and those of its dynamic
    nodes."""
    base = f"{queue.name}-{{}}-{queue.name}-"
    static = [base.format("st") + str(number) for number in range(1, queue.min_count + 1)]
    dynamic = [base.format("dy") + str(number) for number in range(1, queue.max_count - queue.min_count + 1)]
    return static, dynamic


def as_named_there(cluster: Cluster) -> Cluster:
    """Return the cluster with the nodes' names on ParallelCluster, including dynamic nodes."""
    own = settings_of(cluster)
    nodes: list[Node] = []
    partitions: list[Partition] = []
    for partition, queue in zip(cluster.partitions, own.queues, strict=True):
        names = [name for group in node_names(queue) for name in group]
        sample = next((node for node in cluster.nodes if node.name in partition.nodes), _sized(queue))
        nodes += [replace(sample, name=name) for name in names]
        partitions.append(replace(partition, nodes=tuple(names)))
    return replace(cluster, nodes=tuple(nodes), partitions=tuple(partitions))


def _sized(queue: SlurmQueue) -> Node:
    """Return a node with the size of a queue's instance type, for a queue without static nodes."""
    found = instances().get(queue.instances[0])
    cpus, memory = (found.cpus or 1, int((found.memory_gib or 1) * 1024)) if found else (1, 1024)
    return Node("", cpus, memory, gpus=found.gpus if found else 0, instance=queue.instances[0])
