"""The requests that create and change a HyperPod cluster, and the comparison of a cluster with its file. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster
from dalsegno.spec.platform_facts import HyperPodFacts, InstanceGroupFacts
from dalsegno.targets.cloud.consequences import ChangeEffect, SettingChange
from dalsegno.targets.hyperpod.answers import ClusterDescription, GroupDescription, SlurmRole

ENTRY = "on_create.sh"  # the lifecycle script that HyperPod starts
MOST_PER_BATCH = 25  # nodes in one BatchReplaceClusterNodes or BatchRebootClusterNodes


@dataclass(frozen=True)
class SharedFileSystem:
    """An FSx file system and its mount point on every node. `mount_name` is of Lustre only."""

    dns_name: str
    mount: str
    mount_name: str = ""

    @property
    def lustre(self) -> bool:
        return bool(self.mount_name)


@dataclass(frozen=True)
class GroupRequest:
    """One instance group, before it is put into the form of the API."""

    name: str
    role: SlurmRole
    instance_type: str
    count: int
    partition: str = ""
    own: InstanceGroupFacts = field(default_factory=InstanceGroupFacts)


def settings_of(cluster: Cluster) -> HyperPodFacts:
    """Return the facts of the `hyperpod:` block."""
    if cluster.hyperpod is None:
        raise TargetError(f"cluster {cluster.name} is not on HyperPod", hint="set `target: hyperpod`")
    return cluster.hyperpod


def planned_groups(cluster: Cluster) -> list[GroupRequest]:
    """Return the instance groups: the controller, the login nodes, and one for each partition with nodes of its own."""
    own = settings_of(cluster)
    groups = [GroupRequest(own.controller_group, SlurmRole.CONTROLLER, own.head_instance, 1)]
    if cluster.logins:
        groups.append(GroupRequest(own.login_group, SlurmRole.LOGIN, own.login_instance, len(cluster.logins)))
    taken: set[str] = set()
    nodes = {node.name: node for node in cluster.nodes}
    for partition in cluster.partitions:
        fresh = [name for name in partition.nodes if name not in taken]
        # A partition with `nodes_from` has nodes of other groups only; the partitions service adds it to Slurm.
        if fresh and len(fresh) == len(partition.nodes):
            instance = nodes[fresh[0]].instance
            kind = instance if instance.startswith("ml.") else f"ml.{instance}"
            extra = own.groups.get(partition.name, InstanceGroupFacts())
            groups.append(GroupRequest(partition.name, SlurmRole.COMPUTE, kind, len(fresh), partition.name, extra))
        taken.update(partition.nodes)
    return groups


def create_request(cluster: Cluster, shared: Sequence[SharedFileSystem]) -> dict[str, Any]:
    """Return the request CreateCluster."""
    own = settings_of(cluster)
    request: dict[str, Any] = {
        "ClusterName": cluster.name,
        "InstanceGroups": [group_request(own, each, shared) for each in planned_groups(cluster)],
        "NodeRecovery": own.node_recovery,
    }
    if own.configuration == "api":
        request["Orchestrator"] = {"Slurm": {"SlurmConfigStrategy": own.config_strategy}}
    if own.subnets:
        request["VpcConfig"] = {"SecurityGroupIds": list(own.security_groups), "Subnets": list(own.subnets)}
    tags = {"dalsegno-cluster": cluster.name, **own.tags}
    request["Tags"] = [{"Key": key, "Value": value} for key, value in tags.items()]
    return request


def group_request(own: HyperPodFacts, group: GroupRequest, shared: Sequence[SharedFileSystem]) -> dict[str, Any]:
    """Return one entry of InstanceGroups."""
    api = own.configuration == "api"
    request: dict[str, Any] = {
        "InstanceGroupName": group.name,
        "InstanceType": group.instance_type,
        "InstanceCount": group.count,
        # After the initialization by HyperPod's image, or in place of it.
        "LifeCycleConfig": {"SourceS3Uri": own.source_uri, "OnInitComplete" if api else "OnCreate": ENTRY},
        "ExecutionRole": own.execution_role,
        "ThreadsPerCore": group.own.threads_per_core or 1,
    }
    storage = [{"EbsVolumeConfig": {"VolumeSizeInGB": own.volume_gib}}] if own.volume_gib else []
    if api:
        request["SlurmConfig"] = {"NodeType": group.role.value}
        if group.partition:
            request["SlurmConfig"]["PartitionNames"] = [group.partition]
        storage += [_mounted(each) for each in shared]
    if storage:
        request["InstanceStorageConfigs"] = storage
    if group.own.training_plan:
        request["TrainingPlanArn"] = group.own.training_plan
    if group.own.subnets:
        request["OverrideVpcConfig"] = {
            "SecurityGroupIds": list(own.security_groups), "Subnets": list(group.own.subnets),
        }  # fmt: skip
    return request


def _mounted(shared: SharedFileSystem) -> dict[str, Any]:
    if shared.lustre:
        config = {"DnsName": shared.dns_name, "MountName": shared.mount_name, "MountPath": shared.mount}
        return {"FsxLustreConfig": config}
    return {"FsxOpenZfsConfig": {"DnsName": shared.dns_name, "MountPath": shared.mount}}


def update_request(
    cluster: Cluster, found: ClusterDescription, shared: Sequence[SharedFileSystem]
) -> dict[str, Any] | None:
    """Return the request UpdateCluster with the groups that change; None if none does."""
    own = settings_of(cluster)
    known = {group.name: group for group in found.groups}
    wanted = planned_groups(cluster)
    changed = [group_request(own, each, shared) for each in wanted if _differs(own, each, known.get(each.name))]
    leaving = [name for name in known if name not in {each.name for each in wanted}]
    request: dict[str, Any] = {"ClusterName": cluster.name}
    if changed:
        request["InstanceGroups"] = changed
    if leaving:
        request["InstanceGroupsToDelete"] = leaving
    if found.node_recovery and found.node_recovery != own.node_recovery:
        request["NodeRecovery"] = own.node_recovery
    if len(request) == 1:
        return None
    if changed and own.configuration == "api":
        request["Orchestrator"] = {"Slurm": {"SlurmConfigStrategy": own.config_strategy}}
    return request


def _differs(own: HyperPodFacts, wanted: GroupRequest, found: GroupDescription | None) -> bool:
    if found is None or wanted.count != found.target_count:
        return True
    return bool(found.source_uri) and found.source_uri != own.source_uri


def find_changes(cluster: Cluster, found: ClusterDescription) -> tuple[SettingChange, ...]:
    """Return the differences between a running cluster and its file, with the effect of each."""
    return tuple(_changes(cluster, found))


def _changes(cluster: Cluster, found: ClusterDescription) -> Iterator[SettingChange]:
    own = settings_of(cluster)
    wanted, known = {each.name: each for each in planned_groups(cluster)}, {each.name: each for each in found.groups}
    for name, group in wanted.items():
        if name in known:
            yield from _group_changes(own, group, known[name])
        else:
            new = f"{group.count} x {group.instance_type}"
            yield SettingChange(f"instance group {name}", "", new, ChangeEffect.IN_PLACE)
    for name, old in known.items():
        if name not in wanted:
            size = f"{old.current_count} x {old.instance_type}"
            detail = "ends the jobs on them; the files on their local disks are lost"
            yield SettingChange(f"instance group {name}", size, "", ChangeEffect.LOSES_DATA, detail)
    if found.node_recovery and found.node_recovery != own.node_recovery:
        yield SettingChange("NodeRecovery", found.node_recovery, own.node_recovery, ChangeEffect.IN_PLACE)


def _group_changes(own: HyperPodFacts, wanted: GroupRequest, found: GroupDescription) -> Iterator[SettingChange]:
    name = f"instance group {wanted.name}"
    if found.instance_type != wanted.instance_type:
        detail = "give the partition another name, so that it becomes a new instance group"
        effect = ChangeEffect.NEEDS_NEW_CLUSTER
        yield SettingChange(f"{name}: instance type", found.instance_type, wanted.instance_type, effect, detail)
    if found.target_count < wanted.count:
        yield SettingChange(f"{name}: nodes", str(found.target_count), str(wanted.count), ChangeEffect.IN_PLACE)
    if found.target_count > wanted.count:
        detail = "HyperPod chooses the nodes that leave; their jobs end, and their local files are lost"
        effect = ChangeEffect.LOSES_DATA
        yield SettingChange(f"{name}: nodes", str(found.target_count), str(wanted.count), effect, detail)
    if found.source_uri and found.source_uri != own.source_uri:
        detail = "running nodes keep what the old scripts did"
        yield SettingChange(f"{name}: scripts", found.source_uri, own.source_uri, ChangeEffect.IN_PLACE, detail)


def batches(ids: Sequence[str]) -> list[list[str]]:
    """Return the nodes in groups that fit one batch request."""
    return [list(ids[at : at + MOST_PER_BATCH]) for at in range(0, len(ids), MOST_PER_BATCH)]
