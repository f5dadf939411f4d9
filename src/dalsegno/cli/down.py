"""`dalsegno down`: take a cluster away, whole or half-made."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from dalsegno.cli import out
from dalsegno.cli.interrupts import interruptible
from dalsegno.cli.options import cluster_option


@click.command()
@click.argument("cluster", required=False, metavar="[NAME]")
@cluster_option
def command(cluster: str | None, name: str | None) -> None:
    """End the cluster's daemons and jobs and remove all that belongs to it: processes, namespaces, links, files.
    A cluster that is half-made or gone already is fine."""
    from dalsegno.cluster import find_place, may_change, open_local, place_named, places

    wanted = cluster or name or os.environ.get("DALSEGNO_CLUSTER") or _name_in_this_folder()
    if wanted is None and not places():
        out.talk("there is no cluster: nothing to take down")
        return
    place = place_named(wanted) if wanted else find_place()
    may_change(place)
    started = time.monotonic()
    with place.lock(), interruptible(), out.progress() as say:
        found = open_local(place).destroy(say)
    if found:
        out.talk(f"{place.name} is down after {time.monotonic() - started:.1f} s; nothing of it is left")
    else:
        out.talk(f"there was no cluster {place.name}: nothing to take down")


def _name_in_this_folder() -> str | None:
    """The cluster of the file beside us: what `up` here would make, and so what `down` here should take away."""
    import yaml

    try:
        value = yaml.safe_load(Path("cluster.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else None
