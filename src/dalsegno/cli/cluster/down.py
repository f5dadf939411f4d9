"""`dalsegno down`: end the runs on a cluster in an orderly way, then remove it, even if it is incomplete."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import cluster_option
from dalsegno.cli.training.watch import find_status, is_under_way
from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.runs.status import is_over
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.runs.folder import RunFolder

END_TIMEOUT_S = 5.0
TAKEN_DOWN = "cancelled: its cluster was taken down"


@click.command()
@click.argument("cluster", required=False, metavar="[NAME]")
@cluster_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def command(cluster: str | None, name: str | None, yes: bool) -> None:
    """Remove the cluster: its daemons, jobs, processes, namespaces and files.

    Running jobs and runs are ended, and the home folders of users that exist only in the cluster are deleted. The
    command shows this first and, in a terminal, asks you to confirm. It also removes a cluster that was only partly
    created. It is not an error if the cluster does not exist.
    """
    from dalsegno.cli.health.drill_traces import clear_leftovers
    from dalsegno.cluster import find_place, may_change, open_cluster, place_named, places, runs_home
    from dalsegno.recovery.client import controller_answers

    if cluster and cluster.endswith((".yaml", ".yml")):
        raise UsageError(
            f"`down` takes the name of a cluster, and not a file: {cluster}",
            hint=f"`dalsegno down {_name_in(Path(cluster)) or 'NAME'}`; `dalsegno ls` lists the clusters",
        )
    wanted = cluster or name or os.environ.get("DALSEGNO_CLUSTER") or _name_in(Path("cluster.yaml"))
    if wanted is None and not places():
        out.talk("there is no cluster: nothing to remove")
        return
    place = place_named(wanted) if wanted else find_place()
    elevate_to_change(place)
    may_change(place)
    with place.lock(), interruptible():
        target, runs = open_cluster(place), runs_on(place)
        removal = target.removal()
        lines = removal.sentences([run.run for run in runs])
        loses = bool(removal.storage or removal.homes)
        if not _confirm(place.name, lines, yes, must_say_yes=removal.needs_yes and loses):
            out.talk(f"{place.name} was not changed")
            raise SystemExit(1)
        started = time.monotonic()
        with out.progress() as say:
            if controller_answers(target.controller_socket):
                end_in_order(runs)
            found = target.destroy(say)
            write_ends(runs)
        clear_leftovers(runs_home())
    if found:
        left = ", ".join(removal.kept) or "nothing of it"
        out.talk(f"{place.name} is down after {time.monotonic() - started:.1f} s; {left} is left")
    else:
        out.talk(f"there is no cluster {place.name}: nothing to remove")
        if others := [each.name for each in places() if each.name != place.name]:
            named = (
                "" if cluster or name or os.environ.get("DALSEGNO_CLUSTER") else "that name is from ./cluster.yaml; "
            )
            out.advise(f"{named}existing clusters: {', '.join(others)}; to remove one: `dalsegno down {others[0]}`")


def _confirm(name: str, consequences: list[str], yes: bool, *, must_say_yes: bool = False) -> bool:
    """Show the consequences, and return whether the user agrees. Ask only if there is a terminal. With `must_say_yes`,
    a script must pass `--yes`."""
    for line in consequences:
        out.talk(line)
    terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if must_say_yes and not yes and not terminal:
        raise UsageError(f"{name} has storage in a cloud, which is deleted with all files", hint="add `--yes` to do it")
    asked = consequences and not yes and terminal
    return not asked or click.confirm(f"remove {name}?", err=True)


def _name_in(file: Path) -> str | None:
    """Return the cluster name in a cluster file; None if there is none. Without a name, `down` uses the name in
    ./cluster.yaml, which is also the default file of `up`."""
    import yaml

    try:
        value = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None


@dataclass(frozen=True)
class RunOnCluster:
    """A run on the cluster and the uid of its user. `down` writes only into run folders of the calling user."""

    folder: RunFolder
    uid: int

    @property
    def run(self) -> str:
        return self.folder.run

    @property
    def ours(self) -> bool:
        return self.uid == os.geteuid()

    def is_under_way(self) -> bool:
        if self.ours:
            return is_under_way(self.folder)
        from dalsegno.recovery.runs.run_hints import read_hint

        status = read_hint(self.folder.status, self.uid)
        return status is not None and not is_over(status)


def runs_on(place: ClusterPlace) -> list[RunOnCluster]:
    """Return the active runs on the cluster: all runs of this user, and all that the controller supervises."""
    own = {run.root.resolve(): RunOnCluster(run, os.geteuid()) for run in _own(place)}
    kept = {run.folder.root.resolve() if run.ours else run.folder.root: run for run in _kept(place)}
    return sorted((run for run in {**kept, **own}.values() if run.is_under_way()), key=lambda each: each.run)


def _kept(place: ClusterPlace) -> Iterator[RunOnCluster]:
    from dalsegno.recovery.runs.run_records import RunRecords
    from dalsegno.runs.folder import RunFolder
    from dalsegno.targets.folder import ClusterFolder

    records = RunRecords(ClusterFolder(place.folder).runs)
    if records.folder.is_dir():
        for record in records.read()[0].values():
            yield RunOnCluster(RunFolder(Path(record.folder)), record.uid)


def _own(place: ClusterPlace) -> Iterator[RunFolder]:
    """Yield this user's active runs on the cluster, including those whose coordinator runs in a batch step. The
    controller does not know the latter."""
    from dalsegno.cluster import runs_home
    from dalsegno.runs.submit.prepare import list_runs, read_plan
    from dalsegno.targets.folder import ClusterFolder, read_identity

    cluster = read_identity(ClusterFolder(place.folder).slurm_conf)
    for run in list_runs(runs_home()) if cluster else ():
        with contextlib.suppress(DalsegnoError, OSError):
            if is_under_way(run) and read_plan(run).cluster == cluster:
                yield run


def end_in_order(runs: Sequence[RunOnCluster]) -> None:
    """Let the coordinators of this user's runs end their workers, agents and jobs before the cluster is removed.

    Runs of other users end with the cluster and show as lost, because nothing is written into their folders.
    """
    ours = [run for run in runs if run.ours]
    for run in ours:
        with contextlib.suppress(OSError):
            os.close(os.open(run.folder.cancel, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644))
    until = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < until and any(run.is_under_way() for run in ours):
        time.sleep(0.05)


def write_ends(runs: Sequence[RunOnCluster]) -> None:
    """Record the end of this user's runs after the cluster is removed: their coordinators can no longer do so."""
    from dalsegno.runs.status import RunCause, write_status
    from dalsegno.runs.submit.prepare import aborted_status

    for run in runs:
        status = find_status(run.folder) if run.ours else None
        if status is not None and not is_over(status):
            write_status(
                run.folder.status, aborted_status(status, time.time(), TERMINATED, TAKEN_DOWN, RunCause.TAKEN_DOWN)
            )
        elif status is not None and status.cause is RunCause.CANCELLED:
            write_status(run.folder.status, replace(status, message=TAKEN_DOWN, cause=RunCause.TAKEN_DOWN))
