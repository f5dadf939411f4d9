"""The cluster file as a whole."""

from __future__ import annotations

from pydantic import Field

from dalsegno.spec.health import Containers, Health, Modules, Monitoring
from dalsegno.spec.names import ClusterName
from dalsegno.spec.partition import Head, Login, Partition
from dalsegno.spec.people import Account, Storage, User
from dalsegno.spec.section import Section
from dalsegno.spec.slurm import Reservation, Slurm
from dalsegno.spec.targets import HyperPod, Local, Oci, ParallelCluster, Ssh, Target


class ClusterSpec(Section):
    """A cluster, as its file describes it."""

    name: ClusterName = Field(description="Name of the cluster.")
    target: Target = Field(description="Where it runs.")
    local: Local | None = Field(default=None, description="Settings of `target: local`.")
    ssh: Ssh | None = Field(default=None, description="Settings of `target: ssh`.")
    parallelcluster: ParallelCluster | None = Field(default=None, description="Settings of `target: parallelcluster`.")
    hyperpod: HyperPod | None = Field(default=None, description="Settings of `target: hyperpod`.")
    oci: Oci | None = Field(default=None, description="Settings of `target: oci`.")
    head: Head = Field(default_factory=Head, description="The head node.")
    login: Login = Field(default_factory=Login, description="The login nodes.")
    partitions: list[Partition] = Field(max_length=1000, description="Partitions and their nodes.")
    reservations: list[Reservation] = Field(default=[], max_length=1000, description="Nodes set aside.")
    slurm: Slurm = Field(default_factory=Slurm, description="Slurm's own settings.")
    storage: list[Storage] = Field(default=[], max_length=100, description="Shared file systems.")
    containers: Containers = Field(default_factory=Containers, description="Container jobs.")
    accounts: list[Account] = Field(default=[], max_length=10000, description="Slurm accounts.")
    users: list[User] = Field(default=[], max_length=20000, description="People.")
    health: Health = Field(default_factory=Health, description="Health checks and what they may do.")
    monitoring: Monitoring = Field(default_factory=Monitoring, description="Metrics, web page, alerts.")
    modules: Modules = Field(default_factory=Modules, description="Environment modules.")
