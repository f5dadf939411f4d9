"""`dalsegno shell`, `dalsegno env`: use the Slurm commands of a cluster in a new shell or in your own."""

from __future__ import annotations

import os
import shlex

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.out import cluster_option, json_option


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@cluster_option
@click.option(
    "--node",
    "-w",
    "host",
    metavar="HOST",
    help="Enter this host instead of the login or head node (virtual hosts, root only).",
)
@click.option("--user", "-u", metavar="USER", help="Run as this user of the cluster (root only).")
@click.argument("command_", nargs=-1, metavar="[--] [COMMAND]...", type=click.UNPROCESSED)
def command(name: str | None, host: str | None, user: str | None, command_: tuple[str, ...]) -> None:
    """Open a shell, or run COMMAND, with the cluster's Slurm commands. Exits with the command's exit code."""
    from dalsegno.cluster import find_place, open_cluster
    from dalsegno.system.execute import become, run_for_another

    place = find_place(name)
    if host or user:
        elevate_to_change(place)
    target = open_cluster(place)
    entry = target.shell(list(command_), dict(os.environ), os.getcwd(), host=host, user=user)
    for line in entry.warnings:
        out.warn(line)
    if entry.uid is not None:
        raise SystemExit(run_for_another(entry.argv, entry.env, entry.uid))
    become(entry.argv, entry.env)


@click.command()
@cluster_option
@json_option
def env(name: str | None, json_: bool) -> None:
    """Print shell commands that put the cluster's Slurm on your PATH: eval "$(dalsegno env)"."""
    from dalsegno.cluster import find_place, open_cluster

    variables = open_cluster(find_place(name)).user_env(dict(os.environ))
    if json_:
        out.as_json(variables)
    else:
        for key, value in variables.items():
            out.data(f"export {key}={shlex.quote(value)}")
