"""`dalsegno ls`: list the clusters on this machine."""

from __future__ import annotations

import click

from dalsegno.cli import out
from dalsegno.cli.out import json_option


@click.command()
@json_option
def command(json_: bool) -> None:
    """List the clusters on this machine, including partly created ones."""
    from dalsegno.cluster import open_cluster, places

    found = [(place, open_cluster(place).summary()) for place in places()]
    if json_:
        facts = [{"target": s.target, "phase": s.phase.value, "nodes": s.nodes} for _, s in found]
        named = [{"name": place.name, "folder": str(place.folder)} for place, _ in found]
        out.as_json([{**name, **fact} for name, fact in zip(named, facts, strict=True)])
        return
    if not found:
        out.talk("no clusters yet; write a cluster file with `dalsegno init`, then run `dalsegno up`")
        return
    rows = [[place.name, s.target, s.phase.value, str(s.nodes), str(place.folder)] for place, s in found]
    out.table(["NAME", "TARGET", "STATE", "NODES", "FOLDER"], rows)
