"""The cluster's people in Slurm's accounting, and its reservations."""

from __future__ import annotations

from dalsegno.errors import CommandFailed, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.render.commands import accounting_commands, reservation_commands
from dalsegno.spec.facts import Cluster


def register_cluster(slurm: SlurmClient, name: str) -> None:
    """Before slurmctld first starts: one that finds itself unknown to slurmdbd ends at once."""
    slurm.sacctmgr(["add", "cluster", name])


def update_people(slurm: SlurmClient, cluster: Cluster, *, fresh: bool) -> None:
    """Add and change QOS, accounts and users; those no longer in the file keep their history."""
    found = None if fresh else slurm.accounts(cluster.name)
    slurm.sacctmgr_all(accounting_commands(cluster, found))


def update_reservations(slurm: SlurmClient, cluster: Cluster, before: tuple[str, ...]) -> None:
    """Make the file's reservations; those that an earlier file named are made anew."""
    there = _reservation_names(slurm)
    for name in before:
        if name in there:
            slurm.scontrol("delete", f"ReservationName={name}")
    for reservation, command in zip(cluster.reservations, reservation_commands(cluster), strict=True):
        try:
            slurm.scontrol(*command)
        except CommandFailed as error:
            raise TargetError(
                f"Slurm refuses reservation `{reservation.name}`: {error.stderr.strip().splitlines()[-1]}",
                hint="its users must exist on the cluster, its accounts and nodes too, and its time must not be over",
            ) from error


def _reservation_names(slurm: SlurmClient) -> set[str]:
    said = slurm.scontrol("-o", "show", "reservation")
    return {word.partition("=")[2] for word in said.split() if word.startswith("ReservationName=")}
