"""The request that creates a HyperPod cluster, and the instance groups of a cluster file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster
from dalsegno.spec.platform_facts import HyperPodFacts, InstanceGroupFacts
from dalsegno.targets.hyperpod.answers import SharedFileSystem, SlurmRole

ENTRY = "on_create.sh"  # the lifecycle script that HyperPod starts
MOST_PER_BATCH = 25  # maximum number of nodes in one BatchReplaceClusterNodes or BatchRebootClusterNodes


@dataclass(frozen=True)
class GroupRequest:
    """One instance group, before it is converted to the API's form."""

    name: str
    role: SlurmRole
    instance_type: str
    count: int
    partition: str = ""
    own: InstanceGroupFacts = field(default_factory=InstanceGroupFacts)


def settings_of(cluster: Cluster) -> HyperPodFacts:
    """Return the settings of the `hyperpod:` section."""
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
        # A partition with `nodes_from` has only nodes of other groups, so it has no group of its own. The service in
        # `partitions.py` adds it to Slurm.
        if fresh and len(fresh) == len(partition.nodes):
            instance = nodes[fresh[0]].instance  # types from the catalog lack the prefix `ml.`
            kind = instance if instance.startswith("ml.") else f"ml.{instance}"
            extra = own.groups.get(partition.name, InstanceGroupFacts())
            groups.append(GroupRequest(partition.name, SlurmRole.COMPUTE, kind, len(fresh), partition.name, extra))
        taken.update(partition.nodes)
    return groups


def create_request(cluster: Cluster, shared: Sequence[SharedFileSystem]) -> dict[str, Any]:
    """Return the CreateCluster request."""
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
    request["Tags"] = [{"Key": key, "Value": value} for key, value in wanted_tags(cluster).items()]
    return request


def group_request(own: HyperPodFacts, group: GroupRequest, shared: Sequence[SharedFileSystem]) -> dict[str, Any]:
    """Return one entry of InstanceGroups."""
    api = own.configuration == "api"
    request: dict[str, Any] = {
        "InstanceGroupName": group.name,
        "InstanceType": group.instance_type,
        "InstanceCount": group.count,
        # With `api`, HyperPod's image initializes the instance, then the script runs. Otherwise, only the script runs.
        "LifeCycleConfig": {"SourceS3Uri": own.source_uri, entry_moment(own): ENTRY},
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


def entry_moment(own: HyperPodFacts) -> str:
    """Return the field of LifeCycleConfig that names the lifecycle script."""
    return "OnInitComplete" if own.configuration == "api" else "OnCreate"


def wanted_tags(cluster: Cluster) -> dict[str, str]:
    return {"dalsegno-cluster": cluster.name, **settings_of(cluster).tags}


def _mounted(shared: SharedFileSystem) -> dict[str, Any]:
    if shared.lustre:
        config = {"DnsName": shared.dns_name, "MountName": shared.mount_name, "MountPath": shared.mount}
        return {"FsxLustreConfig": config}
    return {"FsxOpenZfsConfig": {"DnsName": shared.dns_name, "MountPath": shared.mount}}


def batches(ids: Sequence[str]) -> list[list[str]]:
    """Split instance ids into lists that fit into one batch request."""
    return [list(ids[at : at + MOST_PER_BATCH]) for at in range(0, len(ids), MOST_PER_BATCH)]
