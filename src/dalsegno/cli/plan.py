"""`dalsegno plan`: show what `up` would do."""

from __future__ import annotations

from pathlib import Path

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_make
from dalsegno.cli.out import file_argument, json_option


@click.command()
@file_argument
@json_option
def command(file: str, json_: bool) -> None:
    """Show what `up` would do with FILE (default: cluster.yaml): what it adds, removes, restarts and waits for."""
    from dalsegno.cluster import may_change, open_target, place_named
    from dalsegno.spec.load import load_spec
    from dalsegno.spec.resolve import resolve

    cluster = resolve(load_spec(Path(file)))
    place = place_named(cluster.name)
    target = open_target(cluster.target, place)
    elevate_to_make(place, cluster, target)
    may_change(place)  # a user who may not change the cluster cannot read all of its state either
    plan = target.plan(cluster)
    consequences = [*plan.sentences(), *plan.details()]
    if json_:
        out.as_json(
            {
                "cluster": cluster.name,
                "target": cluster.target,
                "changes": not plan.empty,
                "consequences": consequences,
            }
        )
    else:
        for line in consequences:
            out.data(line)
