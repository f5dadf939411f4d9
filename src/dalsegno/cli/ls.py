"""`dalsegno ls`: list the clusters on this machine."""

from __future__ import annotations

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option


@click.command()
@json_option
def command(json_: bool) -> None:
    """List the clusters on this machine, including partly created ones."""
    from dalsegno.cluster import open_local, places

    found = [(place, open_local(place).summary()) for place in places()]
    if json_:
        out.as_json([{"name": place.name, "folder": str(place.folder), **summary} for place, summary in found])
        return
    if not found:
        out.talk("no clusters yet; write a cluster file with `dalsegno init`, then run `dalsegno up`")
        return
    rows = [[place.name, str(s["target"]), str(s["phase"]), str(s["nodes"]), str(place.folder)] for place, s in found]
    out.table(["NAME", "TARGET", "STATE", "NODES", "FOLDER"], rows)
