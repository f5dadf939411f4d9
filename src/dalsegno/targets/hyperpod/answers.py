"""Parse HyperPod's answers about a cluster into values. Unknown states become UNKNOWN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar


class HyperPodStatus(Enum):
    """The state of a whole cluster, which the API calls ClusterStatus."""

    CREATING = "Creating"
    DELETING = "Deleting"
    FAILED = "Failed"
    IN_SERVICE = "InService"
    ROLLING_BACK = "RollingBack"
    SYSTEM_UPDATING = "SystemUpdating"
    UPDATING = "Updating"
    UNKNOWN = "unknown"

    @property
    def moving(self) -> bool:
        """Return whether HyperPod is changing the cluster, and would refuse another change."""
        return self in _MOVING


_MOVING = frozenset({
    HyperPodStatus.CREATING, HyperPodStatus.DELETING, HyperPodStatus.ROLLING_BACK, HyperPodStatus.SYSTEM_UPDATING,
    HyperPodStatus.UPDATING,
})  # fmt: skip


class InstanceStatus(Enum):
    """The state of one instance, which the API calls InstanceStatus."""

    RUNNING = "Running"
    FAILURE = "Failure"
    PENDING = "Pending"
    SHUTTING_DOWN = "ShuttingDown"
    SYSTEM_UPDATING = "SystemUpdating"
    DEEP_HEALTH_CHECK = "DeepHealthCheckInProgress"
    NOT_FOUND = "NotFound"
    UNKNOWN = "unknown"


class SlurmRole(Enum):
    """The role of an instance group in Slurm, which the API calls NodeType."""

    CONTROLLER = "Controller"
    LOGIN = "Login"
    COMPUTE = "Compute"


@dataclass(frozen=True)
class SharedFileSystem:
    """An FSx file system and its mount point on every node. Only Lustre has a `mount_name`."""

    dns_name: str
    mount: str
    mount_name: str = ""

    @property
    def lustre(self) -> bool:
        return bool(self.mount_name)


@dataclass(frozen=True)
class GroupDescription:
    """One instance group of a running cluster."""

    name: str
    instance_type: str
    current_count: int
    target_count: int
    source_uri: str = ""
    entry: str = ""  # field of LifeCycleConfig that names the script; "" if it is not reported
    execution_role: str = ""
    threads_per_core: int | None = None  # None if it is not reported
    volume_gib: int | None = None  # size of the additional volume; None if there is none
    training_plan: str = ""
    subnets: tuple[str, ...] = ()  # the group's own; () if it uses those of the cluster
    mounts: tuple[SharedFileSystem, ...] = ()  # the file systems that HyperPod itself mounts


@dataclass(frozen=True)
class ClusterDescription:
    """A running cluster, as DescribeCluster reports it."""

    arn: str
    name: str
    status: HyperPodStatus
    failure: str = ""
    groups: tuple[GroupDescription, ...] = ()
    node_recovery: str = ""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    config_strategy: str = ""  # "" if it is not reported

    @property
    def groups_in_service(self) -> bool:
        """Return whether the cluster has instances. It still has them after a failed change, but not after a failed
        creation."""
        return any(group.current_count for group in self.groups)

    @property
    def id(self) -> str:
        """The part of the ARN that SSM uses as the cluster's id."""
        return self.arn.rpartition("/")[2]

    @property
    def log_group(self) -> str:
        """The log group in CloudWatch that gets the output of the lifecycle scripts."""
        return f"/aws/sagemaker/Clusters/{self.name}/{self.id}"


@dataclass(frozen=True)
class InstanceInfo:
    """One instance, as ListClusterNodes reports it. `host` is its name in Slurm; "" if HyperPod does not report it."""

    group: str
    id: str
    instance_type: str
    status: InstanceStatus
    message: str = ""
    host: str = ""


_State = TypeVar("_State", bound=Enum)


def _state(kind: type[_State], value: object, unknown: _State) -> _State:
    try:
        return kind(value)
    except ValueError:
        return unknown


def read_cluster(answer: Mapping[str, Any]) -> ClusterDescription:
    """Return the answer to DescribeCluster as a value."""
    network, slurm = answer.get("VpcConfig") or {}, (answer.get("Orchestrator") or {}).get("Slurm") or {}
    return ClusterDescription(
        arn=str(answer.get("ClusterArn", "")),
        name=str(answer.get("ClusterName", "")),
        status=_state(HyperPodStatus, answer.get("ClusterStatus"), HyperPodStatus.UNKNOWN),
        failure=str(answer.get("FailureMessage") or ""),
        groups=tuple(_read_group(each) for each in answer.get("InstanceGroups") or ()),
        node_recovery=str(answer.get("NodeRecovery") or ""),
        subnets=tuple(network.get("Subnets") or ()),
        security_groups=tuple(network.get("SecurityGroupIds") or ()),
        config_strategy=str(slurm.get("SlurmConfigStrategy") or ""),
    )


def _read_group(answer: Mapping[str, Any]) -> GroupDescription:
    script, storage = answer.get("LifeCycleConfig") or {}, answer.get("InstanceStorageConfigs") or ()
    volumes = [each["EbsVolumeConfig"].get("VolumeSizeInGB") for each in storage if "EbsVolumeConfig" in each]
    return GroupDescription(
        str(answer.get("InstanceGroupName", "")),
        str(answer.get("InstanceType", "")),
        int(answer.get("CurrentCount") or 0),
        int(answer.get("TargetCount") or 0),
        source_uri=str(script.get("SourceS3Uri", "")),
        entry=next((each for each in ("OnCreate", "OnInitComplete") if script.get(each)), ""),
        execution_role=str(answer.get("ExecutionRole") or ""),
        threads_per_core=answer.get("ThreadsPerCore"),
        volume_gib=next((size for size in volumes if size), None),
        training_plan=str(answer.get("TrainingPlanArn") or ""),
        subnets=tuple((answer.get("OverrideVpcConfig") or {}).get("Subnets") or ()),
        mounts=tuple(_read_mount(each) for each in storage if "EbsVolumeConfig" not in each),
    )


def _read_mount(answer: Mapping[str, Any]) -> SharedFileSystem:
    found = answer.get("FsxLustreConfig") or answer.get("FsxOpenZfsConfig") or {}
    return SharedFileSystem(
        str(found.get("DnsName", "")), str(found.get("MountPath", "")), str(found.get("MountName") or "")
    )


def read_instances(summaries: Iterable[Mapping[str, Any]]) -> list[InstanceInfo]:
    """Return the entries of ListClusterNodes as values, ordered by group and id."""
    found = [
        InstanceInfo(
            group=str(each.get("InstanceGroupName", "")),
            id=str(each.get("InstanceId", "")),
            instance_type=str(each.get("InstanceType", "")),
            status=_state(InstanceStatus, (each.get("InstanceStatus") or {}).get("Status"), InstanceStatus.UNKNOWN),
            message=str((each.get("InstanceStatus") or {}).get("Message") or ""),
            host=str(each.get("PrivateDnsHostname") or "").partition(".")[0],
        )
        for each in summaries
    ]
    return sorted(found, key=lambda each: (each.group, each.id))
