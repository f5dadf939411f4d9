"""`dalsegno env`: print shell commands that put the cluster's Slurm on PATH."""

from __future__ import annotations

import shlex

import click

from dalsegno.cli import out
from dalsegno.cli.out import cluster_option, json_option


@click.command()
@cluster_option
@json_option
def command(name: str | None, json_: bool) -> None:
    """Print shell commands that put the cluster's Slurm on your PATH: eval "$(dalsegno env)"."""
    import os

    from dalsegno.cluster import find_place, open_cluster

    env = open_cluster(find_place(name)).user_env(dict(os.environ))
    if json_:
        out.as_json(env)
    else:
        for key, value in env.items():
            out.data(f"export {key}={shlex.quote(value)}")
