"""The cluster's people in Slurm's accounting, and its reservations."""

from __future__ import annotations

from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster


def register_cluster(slurm: SlurmClient, name: str) -> None:
    slurm.sacctmgr(["add", "cluster", name])


def update_people(slurm: SlurmClient, cluster: Cluster, address: str) -> None:
    pass


def update_reservations(slurm: SlurmClient, cluster: Cluster) -> None:
    pass
