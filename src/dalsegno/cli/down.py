"""`dalsegno down`: remove a cluster, complete or not."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.out import cluster_option


@click.command()
@click.argument("cluster", required=False, metavar="[NAME]")
@cluster_option
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
def command(cluster: str | None, name: str | None, yes: bool) -> None:
    """Remove the cluster: its daemons, jobs, processes, namespaces and files.

    Running jobs and runs are ended, and the home folders of users that exist only in the cluster are deleted. This is
    shown first and, in a terminal, you are asked to confirm. Also removes a cluster that was only partly created. It
    is no error if the cluster does not exist.
    """
    from dalsegno.cli.drill_traces import clear_leftovers
    from dalsegno.cli.last_runs import end_in_order, runs_on, write_ends
    from dalsegno.cluster import find_place, may_change, open_cluster, place_named, places, runs_home
    from dalsegno.recovery.client import controller_answers

    wanted = cluster or name or os.environ.get("DALSEGNO_CLUSTER") or _name_in_this_folder()
    if wanted is None and not places():
        out.talk("there is no cluster: nothing to remove")
        return
    place = place_named(wanted) if wanted else find_place()
    elevate_to_change(place)
    may_change(place)
    with place.lock(), interruptible():
        target, runs = open_cluster(place), runs_on(place)
        if not _confirm(place.name, target.removal().sentences([run.run for run in runs]), yes):
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
        out.talk(f"{place.name} is down after {time.monotonic() - started:.1f} s; nothing of it is left")
    else:
        out.talk(f"there is no cluster {place.name}: nothing to remove")
        if others := [each.name for each in places() if each.name != place.name]:
            named = (
                "" if cluster or name or os.environ.get("DALSEGNO_CLUSTER") else "that name is from ./cluster.yaml; "
            )
            out.advise(f"{named}existing clusters: {', '.join(others)}; to remove one: `dalsegno down {others[0]}`")


def _confirm(name: str, consequences: list[str], yes: bool) -> bool:
    """Show the consequences and, in a terminal, ask for confirmation. A script is not asked."""
    for line in consequences:
        out.talk(line)
    asked = consequences and not yes and sys.stdin.isatty() and sys.stderr.isatty()
    return not asked or click.confirm(f"remove {name}?", err=True)


def _name_in_this_folder() -> str | None:
    """Return the cluster name in ./cluster.yaml: `down` removes the cluster that `up` creates in the same folder."""
    import yaml

    try:
        value = yaml.safe_load(Path("cluster.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
