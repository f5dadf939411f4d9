"""`dalsegno shell`: at home on the cluster."""

from __future__ import annotations

import os

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.out import cluster_option


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@cluster_option
@click.option(
    "--node",
    "-w",
    "host",
    metavar="HOST",
    help="Enter this host instead of the login node or head (virtual hosts, root).",
)
@click.option("--user", "-u", metavar="USER", help="As this user of the cluster (root only).")
@click.argument("command_", nargs=-1, metavar="[--] [COMMAND]...", type=click.UNPROCESSED)
def command(name: str | None, host: str | None, user: str | None, command_: tuple[str, ...]) -> None:
    """Open a shell, or run one COMMAND, with this cluster's Slurm commands. The exit code is the command's own."""
    from dalsegno.cluster import find_place, open_local
    from dalsegno.system.execute import become, run_for_another

    place = find_place(name)
    if host or user:
        elevate_to_change(place)
    target = open_local(place)
    argv, env = target.shell(list(command_), dict(os.environ), os.getcwd(), host=host, user=user)
    if user:
        for line in target.closed_to_users():
            out.warn(line)
        raise SystemExit(run_for_another(argv, env, target.uid_of(user)))
    become(argv, env)
