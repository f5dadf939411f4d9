"""Check what this machine needs for a cluster: the programs of the daemons, and the programs for containers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dalsegno.containers import native
from dalsegno.errors import TargetError
from dalsegno.spec.facts import Cluster
from dalsegno.system.machine import DAEMONS, MachineFacts, missing_packages
from dalsegno.system.processes import Runner
from dalsegno.targets.local import directory, monitoring
from dalsegno.targets.local.folder import Folder
from dalsegno.users.ldap_directory import check_ldap3

ALWAYS = ("slurmctld", "slurmd", "sinfo", "munged")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db")


def check_packages(cluster: Cluster, machine: MachineFacts, prometheus: bool) -> None:
    """Raise an error if a program or a Python package that this cluster needs is missing.

    If Prometheus is on, also raise one if a file with a secret of `monitoring.alerts` is open to other users.
    """
    programs = [
        *ALWAYS,
        *(ACCOUNTING if cluster.slurm.accounting else ()),
        *(["slurmrestd"] if cluster.slurm.rest else []),
        *(directory.PROGRAMS if cluster.directory.ldap else ()),
    ]
    if cluster.directory.ldap:
        check_ldap3()
    if prometheus:
        programs += monitoring.PROGRAMS.values()
        monitoring.check_secret_files(cluster)
    if machine.is_root:
        programs += ["ip", "nsenter"]
    missing = missing_packages(tuple(programs))
    if missing:
        lacking = ", ".join(name for name in programs if DAEMONS[name] in missing)
        raise TargetError(
            f"this machine lacks {lacking}",
            hint="`./dalsegno setup` installs them, or: "
            f"sudo apt-get install --no-install-recommends {' '.join(missing)}",
        )


def resolve_containers(
    cluster: Cluster, runner: Runner, cache: Path, machine: MachineFacts, folder: Folder
) -> tuple[Cluster, str]:
    """Return the cluster with containers switched on or off, and the reason why this machine cannot run containers.

    If the cluster file does not say whether to use containers, they are on if this machine can run them. The reason is
    "" if the machine can run them, or if the file decides. Raise an error if the file requires containers and packages
    for them are missing.
    """
    if cluster.containers.enabled is False:
        return cluster, ""
    if cluster.containers.enabled:
        if lacking := native.missing_packages():
            raise TargetError(
                f"containers need packages that this machine lacks: {' '.join(lacking)}",
                hint="`./dalsegno setup` installs them, or: "
                f"sudo apt-get install --no-install-recommends {' '.join(lacking)}",
            )
        return cluster, ""
    why = native.prepare_native(runner, cache, machine.slurm_version, str(folder.root))
    return replace(cluster, containers=replace(cluster.containers, enabled=not why)), why
