"""Facts about clusters on ParallelCluster: the resolved section `parallelcluster` as frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AccountingDatabase:
    """A MySQL server for Slurm's accounting."""

    uri: str
    user: str
    password_secret: str  # ARN of the secret with the password, never the password itself


@dataclass(frozen=True)
class AwsDirectory:
    """A directory of users."""

    domain: str
    address: str
    password_secret: str
    reader: str
    ca_certificate: str = ""
    access_filter: str = ""
    create_ssh_keys: bool = True


@dataclass(frozen=True)
class CustomAction:
    """A user's script that the platform runs on machines."""

    script: str
    args: tuple[str, ...] = ()
    on: str = "all"  # machines that run it: head, compute, login or all
    at: str = "configured"  # when it runs: start, configured or updated


@dataclass(frozen=True)
class DataRepository:
    """A folder of a Lustre file system that mirrors a bucket."""

    storage: str
    path: str
    s3: str
    import_events: tuple[str, ...]
    export_events: tuple[str, ...]


@dataclass(frozen=True)
class SlurmQueue:
    """One partition as a queue of ParallelCluster.

    `min_count` nodes always run. More nodes, up to `max_count` in total, are started on demand.
    """

    name: str
    instances: tuple[str, ...]
    min_count: int
    max_count: int
    capacity_type: str = "ONDEMAND"
    capacity_reservation: str = ""
    subnets: tuple[str, ...] = ()  # empty means the subnets of the cluster
    security_groups: tuple[str, ...] = ()
    placement_group: bool = True
    placement_group_name: str = ""  # an existing group; empty: ParallelCluster creates one
    efa: bool = False
    spot_price: float | None = None
    root_volume_gib: int = 200
    ami: str = ""


@dataclass(frozen=True)
class PclusterSettings:
    """The section `parallelcluster`, with the machines of head and login nodes."""

    region: str
    version: str
    os: str
    head_instance: str
    queues: tuple[SlurmQueue, ...]
    login_instance: str = ""
    login_count: int = 0
    stacks: tuple[str, ...] = ()
    availability_zone: str = ""
    head_subnet: str = ""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    key: str = ""
    allowed_ips: str = ""
    scaledown_idletime_min: int = 10
    queue_update: str = "DRAIN"
    ami: str = ""
    head_root_volume_gib: int = 500
    gpu_health_checks: bool = False
    bucket: str = ""
    database: AccountingDatabase | None = None
    directory: AwsDirectory | None = None
    actions: tuple[CustomAction, ...] = ()
    data_repositories: tuple[DataRepository, ...] = ()
    policies: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
