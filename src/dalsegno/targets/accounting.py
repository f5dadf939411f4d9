"""Update Slurm's accounting and reservations from the cluster file. Every target that runs Slurm itself uses this
module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import CommandFailed, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.render.commands import accounting_commands, deletion_commands, reservation_commands
from dalsegno.spec.facts import Cluster


def register_cluster(slurm: SlurmClient, name: str) -> None:
    """Register the cluster with slurmdbd before slurmctld first starts. slurmctld exits if slurmdbd does not know the
    cluster."""
    slurm.sacctmgr(["add", "cluster", name])


def update_people(
    slurm: SlurmClient, cluster: Cluster, removed: Sequence[str] = (), *, fresh: bool, keep_admins: bool = False
) -> None:
    """Add and change QOS, accounts and users. Delete the users that `dalsegno user rm` has removed (`removed`).

    Other entries stay in Slurm, with their history, even if the cluster file no longer has them. With `keep_admins`,
    all admin levels stay too, because the database belongs to a platform, or to several clusters.
    """
    found = None if fresh else slurm.accounts(cluster.name)
    if found and keep_admins:
        found = replace(found, users={name: {**user, "AdminLevel": "None"} for name, user in found.users.items()})
    deletions = deletion_commands(cluster, removed, found) if found else []
    slurm.sacctmgr_all([*accounting_commands(cluster, found), *deletions])


def update_reservations(slurm: SlurmClient, cluster: Cluster, before: tuple[str, ...]) -> None:
    """Delete those of the reservations `before` that still exist, then create the reservations of the cluster file."""
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
                hint="its users, accounts and nodes must exist, and its end must be in the future",
            ) from error


def _reservation_names(slurm: SlurmClient) -> set[str]:
    output = slurm.scontrol("-o", "show", "reservation")
    return {word.partition("=")[2] for word in output.split() if word.startswith("ReservationName=")}


DATABASE_SQL = "CREATE DATABASE IF NOT EXISTS slurm_acct_db;\n"


def mariadbd_options(user: str, folder: Path, init_file: Path, data: str = "data") -> list[str]:
    """Return the options of a MariaDB server for one cluster. `folder` has mode 0700, and contains the data and the
    socket.

    The server listens only on that socket, not on the network, so it needs no passwords.
    """
    return [
        "--no-defaults", f"--user={user}", f"--datadir={folder / data}", f"--socket={folder / 'db.sock'}",
        f"--pid-file={folder / 'db.pid'}", f"--init-file={init_file}", f"--tmpdir={folder}",
        "--skip-networking", "--skip-grant-tables", "--skip-log-bin", "--performance-schema=OFF",
        "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=64M", "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=2", "--max-allowed-packet=16M",
    ]  # fmt: skip
