"""The cluster's users and accounts in Slurm's accounting, its reservations, and its database."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from dalsegno.errors import CommandFailed, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.render.commands import accounting_commands, deletion_commands, reservation_commands
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import make_folder, remove_tree
from dalsegno.system.machine import program
from dalsegno.system.processes import Runner


def register_cluster(slurm: SlurmClient, name: str) -> None:
    """Register the cluster before slurmctld first starts: slurmctld exits if slurmdbd does not know the cluster."""
    slurm.sacctmgr(["add", "cluster", name])


def update_people(slurm: SlurmClient, cluster: Cluster, removed: Sequence[str] = (), *, fresh: bool) -> None:
    """Add and change QOS, accounts and users. Entries removed from the cluster file are kept, with their history.

    `removed`: users that a command has removed.
    """
    found = None if fresh else slurm.accounts(cluster.name)
    deletions = deletion_commands(cluster, removed, found) if found else []
    slurm.sacctmgr_all([*accounting_commands(cluster, found), *deletions])


def update_reservations(slurm: SlurmClient, cluster: Cluster, before: tuple[str, ...]) -> None:
    """Create the reservations of the cluster file. Delete those of an earlier file (`before`) first."""
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


NEEDED_MIB = 256


def fill_database(runner: Runner, target: Path, cache: Path, user: str) -> None:
    """Create an empty database for the cluster, unless it has one."""
    if target.exists():
        return
    free_mib = shutil.disk_usage(target.parent).free >> 20
    if free_mib < NEEDED_MIB:
        raise TargetError(
            f"no space left for the accounting database: it needs {NEEDED_MIB} MiB, {target.parent} has {free_mib}",
            hint="free some space, set DALSEGNO_HOME to another disk, or set `slurm: {accounting: false}`",
        )
    template = cache / f"mariadb-{_mariadb_version(runner)}"
    if not template.exists():
        _make_template(runner, template, user)
    # The copy is renamed last, so that an interrupted copy is never used as a database.
    part = target.with_name("db.part")
    remove_tree(part)
    runner.run(["cp", "-a", "--sparse=always", str(template), str(part)], timeout_s=120).checked(
        hint="is the disk full? free some space, or set DALSEGNO_HOME to another disk"
    )
    part.rename(target)


def _mariadb_version(runner: Runner) -> str:
    output = runner.run([program("mariadbd") or "mariadbd", "--version"], timeout_s=30).checked().stdout
    found = re.search(r"Ver (\S+?)(-MariaDB)?\s", output)
    if not found:
        raise TargetError(
            f"unexpected output of `mariadbd --version`: {output.strip()[:200]}",
            hint="`./dalsegno setup` installs MariaDB",
        )
    return re.sub(r"[^\w.+-]", "_", found[1])


def _make_template(runner: Runner, template: Path, user: str) -> None:
    make_folder(template.parent)
    for old in template.parent.glob("*.part"):
        if not Path(f"/proc/{old.suffixes[-2][1:]}").exists():
            remove_tree(old)  # left by an `up` that was killed here
    part = template.with_name(f"{template.name}.{os.getpid()}.part")
    install = program("mariadb-install-db") or "mariadb-install-db"
    # Run in the parent folder: mariadb-install-db fails if an absolute path contains a blank.
    argv = [install, "--no-defaults", f"--datadir=./{part.name}", f"--user={user}", "--skip-test-db"]
    env = {**os.environ, "TMPDIR": "."}  # relative to that folder: the user's TMPDIR may be full or missing
    done = runner.run([*argv, "--auth-root-authentication-method=normal"], cwd=str(part.parent), env=env, timeout_s=120)
    if done.exit_code != 0:
        remove_tree(part)
        done.checked()
    part.chmod(0o700)
    try:
        part.rename(template)
    except OSError:
        remove_tree(part)  # another `up` created the template first
