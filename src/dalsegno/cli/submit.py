"""`dalsegno submit`: a job file, or anybody's sbatch script as it is."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dalsegno.cli import out
from dalsegno.errors import UsageError

_HINT = "name a job file (`job.yaml`), or an sbatch script, whose first line starts with `#!`"


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--cluster", "-M", metavar="NAME", help="Which cluster; else the one this shell is on, or the only one.")
@click.option("--detach", is_flag=True, help="Job file: submit and leave; the run's id is printed.")
@click.option("--dry-run", is_flag=True, help="Job file: print what Slurm would be asked for, and ask for nothing.")
@click.argument("file", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(file: str, args: tuple[str, ...], cluster: str | None, detach: bool, dry_run: bool) -> None:
    """Submit FILE: a job file (`job.yaml`, with the options of `run` as its keys), or any sbatch script, unchanged.

    A job file's run is followed to its end, as by `run`; an sbatch script gets ARGS, and its job's id is printed.

    \b
    dalsegno submit job.yaml
    dalsegno submit --detach job.yaml
    dalsegno submit train.sh --lr 1e-4
    """
    if file.endswith((".yaml", ".yml")):
        raise SystemExit(_submit_job(file, args, cluster, detach, dry_run))
    _check_script(file)
    if detach or dry_run:
        raise UsageError("`--detach` and `--dry-run` are for job files", hint="an sbatch script goes to Slurm as it is")
    _submit_script(file, args, cluster)


def _submit_job(file: str, args: tuple[str, ...], cluster: str | None, detach: bool, dry_run: bool) -> int:
    from dalsegno.cli.submission import hand_over
    from dalsegno.runs.submit.job_file import load_job
    from dalsegno.runs.submit.options import options_from_env

    if args:
        raise UsageError("a job file takes no arguments", hint="write them in the file: `args: --lr 0.1`")
    over = {**options_from_env(os.environ), **({"detach": True} if detach else {})}
    return hand_over(load_job(file, over), cluster, dry_run)


def _submit_script(file: str, args: tuple[str, ...], cluster: str | None) -> None:
    """sbatch reads a word with no slash in it as a file of this folder, so it gets the name as it was given."""
    from dalsegno.cluster import find_slurm

    job = find_slurm(cluster).client.submit(args=[file if "/" in file else f"./{file}", *args])
    out.data(f"Submitted batch job {job}")


def _check_script(file: str) -> None:
    try:
        with Path(file).open("rb") as opened:
            start = opened.read(2)
    except OSError as error:
        raise UsageError(f"`{file}` cannot be read: {error.strerror}", hint=_HINT) from None
    if start != b"#!":
        raise UsageError(f"`{file}` is neither a job file nor a script", hint=_HINT)
