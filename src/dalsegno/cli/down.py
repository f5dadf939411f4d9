"""`dalsegno down`: take a cluster away, whole or half-made."""

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
@click.option("--yes", "-y", is_flag=True, help="Do not ask, whatever goes with it.")
def command(cluster: str | None, name: str | None, yes: bool) -> None:
    """Stop the cluster's daemons and jobs and remove everything that belongs to it: processes, namespaces, files.
    Runs and jobs under way end with it, and the home folders of users that exist only there are deleted: it says so
    and, in a terminal, asks first. A cluster that is half-made or gone already is fine."""
    from dalsegno.cli.drill_traces import clear_leftovers
    from dalsegno.cli.last_runs import end_in_order, runs_on, write_ends
    from dalsegno.cluster import find_place, may_change, open_local, place_named, places, runs_home
    from dalsegno.recovery.client import controller_answers

    wanted = cluster or name or os.environ.get("DALSEGNO_CLUSTER") or _name_in_this_folder()
    if wanted is None and not places():
        out.talk("there is no cluster: nothing to take down")
        return
    place = place_named(wanted) if wanted else find_place()
    elevate_to_change(place)
    may_change(place)
    with place.lock(), interruptible():
        target, runs = open_local(place), runs_on(place)
        if not _agreed(place.name, target.removal().sentences([run.run for run in runs]), yes):
            out.talk(f"{place.name} stays as it is")
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
        out.talk(f"there was no cluster {place.name}: nothing to take down")
        if others := [each.name for each in places() if each.name != place.name]:
            named = (
                "" if cluster or name or os.environ.get("DALSEGNO_CLUSTER") else "cluster.yaml here names that one; "
            )
            out.advise(f"{named}there is {' and '.join(others)}: `dalsegno down {others[0]}`")


def _agreed(name: str, consequences: list[str], yes: bool) -> bool:
    """Who can be asked is asked; a script is told, and means it."""
    for line in consequences:
        out.talk(line)
    asked = consequences and not yes and sys.stdin.isatty() and sys.stderr.isatty()
    return not asked or click.confirm(f"take {name} down?", err=True)


def _name_in_this_folder() -> str | None:
    """The cluster of the file beside us: what `up` here would make, and so what `down` here should take away."""
    import yaml

    try:
        value = yaml.safe_load(Path("cluster.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
