"""`dalsegno run`: training that survives."""

from __future__ import annotations

from typing import Any

import click

from dalsegno.cli import out
from dalsegno.cli.handing_over import hand_over
from dalsegno.cli.run_options import RUN_SETTINGS, fields_given, misplaced, run_options


@click.command(context_settings=dict(RUN_SETTINGS))
@run_options
@click.option("--cluster", "-M", metavar="NAME", help="Which cluster; else the one this shell is on, or the only one.")
@click.option("--dry-run", is_flag=True, help="Print what Slurm would be asked for, and ask for nothing.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], cluster: str | None, dry_run: bool, **given: Any) -> None:
    """Run SCRIPT with its ARGS on the cluster's nodes, and follow it to its end. The exit code is the run's own.

    A node that is lost is replaced and the run goes on. Ctrl-C asks whether to leave the run or to end it.
    Options stand before SCRIPT; each may also be a variable: DALSEGNO_RUN_NODES=4.

    \b
    dalsegno run --nodes 4 --gpus-per-node 8 train.py --lr 1e-4
    dalsegno run -N 2:4 --spares 1 -t 2-00:00:00 --detach train.py
    dalsegno run --nodes 2 --framework mpi ./solver
    """
    import os

    from dalsegno.runs.submit.options import make_request, options_from_env

    if late := misplaced(args):
        words = " and ".join(f"`{word}`" for word in late)
        out.warn(f"{words} after {script} goes to the script, not to `dalsegno run`")
        out.advise(f"put options for `dalsegno run` before the script: `dalsegno run {late[0]} … {script}`")
    request = make_request(script, args, options_from_env(os.environ), fields_given(given))
    raise SystemExit(hand_over(request, cluster, dry_run))
