"""The workspace of Amazon Managed Service for Prometheus that `monitor up` creates if the cluster file names none."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster, RemoteWrite
from dalsegno.targets.base import Say
from dalsegno.targets.hyperpod.api import HyperPodApi

WRITE_PATH = "api/v1/remote_write"
POLL_S = 5.0
POLLS = 60


class WorkspaceState(Enum):
    """The state of a workspace, which the API calls statusCode."""

    CREATING = "CREATING"
    ACTIVE = "ACTIVE"
    UNKNOWN = "unknown"

    @classmethod
    def _missing_(cls, value: object) -> WorkspaceState:
        return cls.UNKNOWN


def find_or_create_workspace(api: HyperPodApi, cluster: str, pause: Callable[[float], None], say: Say) -> str:
    """Return the address that Prometheus writes to. Create the workspace, unless an earlier call did."""
    alias = f"dalsegno-{cluster}"
    id = api.find_workspace(alias)
    if not id:
        say(f"creating the workspace {alias} of Amazon Managed Service for Prometheus")
        id = api.create_workspace(alias)
    for _ in range(POLLS):
        status, endpoint = api.workspace(id)
        if WorkspaceState(status) is WorkspaceState.ACTIVE and endpoint:
            return f"{endpoint.rstrip('/')}/{WRITE_PATH}"
        if WorkspaceState(status) is WorkspaceState.UNKNOWN:
            break
        pause(POLL_S)
    raise TargetError(
        f"the workspace {id} is {status}",
        hint=f"`aws amp describe-workspace --workspace-id {id}` shows why; then run the command again",
    )


def remote_write(cluster: Cluster, created: str, region: str) -> RemoteWrite | None:
    """Return where metrics go: to the workspace of the file, or to the one that `monitor up` created."""
    return cluster.monitoring.remote_write or (RemoteWrite(created, region) if created else None)


def with_workspace(cluster: Cluster, created: str, region: str) -> Cluster:
    """Return the cluster with the workspace that receives its metrics."""
    settings = replace(cluster.monitoring, remote_write=remote_write(cluster, created, region))
    return replace(cluster, monitoring=settings)


def write_permission(role: str) -> str:
    """Return the command that attaches AWS's policy with `aps:RemoteWrite` to the role of the instances. `role` is the
    ARN of that role."""
    partition, name = role.split(":")[1], role.rpartition("/")[2]
    policy = f"arn:{partition}:iam::aws:policy/AmazonPrometheusRemoteWriteAccess"
    return shlex.join(["aws", "iam", "attach-role-policy", "--role-name", name, "--policy-arn", policy])
