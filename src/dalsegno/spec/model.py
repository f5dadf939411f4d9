"""The model of the whole cluster file."""

from __future__ import annotations

from pydantic import Field

from dalsegno.spec.health import ContainersSpec, HealthSpec, Modules, Monitoring
from dalsegno.spec.names import ClusterName
from dalsegno.spec.partition import Head, Login, PartitionSpec
from dalsegno.spec.people import AccountSpec, StorageSpec, UserSpec
from dalsegno.spec.section import Section
from dalsegno.spec.slurm import ReservationSpec, SlurmSpec
from dalsegno.spec.targets import HyperPod, LocalSpec, Oci, ParallelCluster, Ssh, Target


class ClusterSpec(Section):
    """A cluster as described by its file."""

    name: ClusterName = Field(description="Name of the cluster.")
    target: Target = Field(description="Where the cluster runs.")
    local: LocalSpec | None = Field(default=None, description="Settings of `target: local`.")
    ssh: Ssh | None = Field(default=None, description="Settings of `target: ssh`.")
    parallelcluster: ParallelCluster | None = Field(default=None, description="Settings of `target: parallelcluster`.")
    hyperpod: HyperPod | None = Field(default=None, description="Settings of `target: hyperpod`.")
    oci: Oci | None = Field(default=None, description="Settings of `target: oci`.")
    head: Head = Field(default_factory=Head, description="The head node.")
    login: Login = Field(default_factory=Login, description="Login nodes, where users log in.")
    partitions: list[PartitionSpec] = Field(max_length=1000, description="Partitions and their nodes.")
    reservations: list[ReservationSpec] = Field(default=[], max_length=1000, description="Slurm reservations.")
    slurm: SlurmSpec = Field(default_factory=SlurmSpec, description="Slurm policy of the whole cluster.")
    storage: list[StorageSpec] = Field(default=[], max_length=100, description="Shared file systems.")
    containers: ContainersSpec = Field(default_factory=ContainersSpec, description="Container jobs.")
    accounts: list[AccountSpec] = Field(default=[], max_length=10000, description="Slurm accounts.")
    users: list[UserSpec] = Field(default=[], max_length=20000, description="Users of the cluster.")
    health: HealthSpec = Field(default_factory=HealthSpec, description="Health checks and the actions allowed.")
    monitoring: Monitoring = Field(default_factory=Monitoring, description="Metrics, web page, alerts.")
    modules: Modules = Field(default_factory=Modules, description="Environment modules.")
