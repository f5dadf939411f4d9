"""Parse HyperPod's answers about a cluster into values. Unknown states become UNKNOWN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar


class HyperPodStatus(Enum):
    """The state of a whole cluster (ClusterStatus)."""

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
        """Whether HyperPod is changing the cluster, and would refuse another change."""
        return self in _MOVING


_MOVING = frozenset({
    HyperPodStatus.CREATING, HyperPodStatus.DELETING, HyperPodStatus.ROLLING_BACK, HyperPodStatus.SYSTEM_UPDATING,
    HyperPodStatus.UPDATING,
})  # fmt: skip


class InstanceStatus(Enum):
    """The state of one instance (InstanceStatus)."""

    RUNNING = "Running"
    FAILURE = "Failure"
    PENDING = "Pending"
    SHUTTING_DOWN = "ShuttingDown"
    SYSTEM_UPDATING = "SystemUpdating"
    DEEP_HEALTH_CHECK = "DeepHealthCheckInProgress"
    NOT_FOUND = "NotFound"
    UNKNOWN = "unknown"


class SlurmRole(Enum):
    """The role of an instance group in Slurm (NodeType)."""

    CONTROLLER = "Controller"
    LOGIN = "Login"
    COMPUTE = "Compute"


@dataclass(frozen=True)
class GroupDescription:
    """One instance group of a running cluster."""

    name: str
    instance_type: str
    current_count: int
    target_count: int
    source_uri: str = ""


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

    @property
    def groups_in_service(self) -> bool:
        """Whether the cluster has instances: it has them after a failed change, but not after a failed creation."""
        return any(group.current_count for group in self.groups)

    @property
    def id(self) -> str:
        """The id of the cluster in names of SSM targets."""
        return self.arn.rpartition("/")[2]


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
    groups = tuple(
        GroupDescription(
            str(each.get("InstanceGroupName", "")),
            str(each.get("InstanceType", "")),
            int(each.get("CurrentCount") or 0),
            int(each.get("TargetCount") or 0),
            str((each.get("LifeCycleConfig") or {}).get("SourceS3Uri", "")),
        )
        for each in answer.get("InstanceGroups") or ()
    )
    return ClusterDescription(
        arn=str(answer.get("ClusterArn", "")),
        name=str(answer.get("ClusterName", "")),
        status=_state(HyperPodStatus, answer.get("ClusterStatus"), HyperPodStatus.UNKNOWN),
        failure=str(answer.get("FailureMessage") or ""),
        groups=groups,
        node_recovery=str(answer.get("NodeRecovery") or ""),
        subnets=tuple((answer.get("VpcConfig") or {}).get("Subnets") or ()),
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
