"""`dalsegno ls`: the clusters on this machine."""

from __future__ import annotations

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option


@click.command()
@json_option
def command(json_: bool) -> None:
    """List the clusters on this machine, half-made ones too."""
    from dalsegno.cluster import open_local, places

    found = [(place, open_local(place).summary()) for place in places()]
    if json_:
        out.as_json([{"name": place.name, "folder": str(place.folder), **summary} for place, summary in found])
        return
    if not found:
        out.talk("no clusters yet; `dalsegno init` writes a cluster file, `dalsegno up` makes it real")
        return
    rows = [[place.name, str(s["target"]), str(s["phase"]), str(s["nodes"]), str(place.folder)] for place, s in found]
    out.table(["NAME", "TARGET", "STATE", "NODES", "FOLDER"], rows)
