"""`dalsegno ssh`: open a shell or run a command on a node, over ssh or inside a virtual host."""

from __future__ import annotations

import os

import click

from dalsegno.cli import out
from dalsegno.cli.elevation import elevate_to_change
from dalsegno.cli.out import cluster_option


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@cluster_option
@click.argument("node")
@click.argument("command_", nargs=-1, metavar="[--] [COMMAND]...", type=click.UNPROCESSED)
def command(name: str | None, node: str, command_: tuple[str, ...]) -> None:
    """Open a shell, or run COMMAND, on NODE. Exits with the command's exit code.

    Hosts of `target: ssh` are reached with the `ssh` client and the settings of the cluster file. A virtual host of a
    local cluster is entered, as root only.
    """
    from dalsegno.cluster import find_place, open_cluster
    from dalsegno.system.execute import become, run_for_another

    place = find_place(name)
    elevate_to_change(place)
    # click keeps a `--` that follows the name of the node
    words = list(command_[1:] if command_[:1] == ("--",) else command_)
    entry = open_cluster(place).shell(words, dict(os.environ), os.getcwd(), host=node)
    for line in entry.warnings:
        out.warn(line)
    if entry.uid is not None:
        raise SystemExit(run_for_another(entry.argv, entry.env, entry.uid))
    become(entry.argv, entry.env)
