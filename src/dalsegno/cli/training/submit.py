"""`dalsegno submit`: submit a job file, or any sbatch script unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dalsegno.cli import out
from dalsegno.errors import UsageError

_HINT = "give a job file (`job.yaml`), or an sbatch script, whose first line starts with `#!`"


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--cluster", "-M", metavar="NAME", help="Cluster to use. Default: the cluster of this shell, or the only one."
)
@click.option("--detach", is_flag=True, help="Job file: print the run's id and return, without following the output.")
@click.option("--dry-run", is_flag=True, help="Job file: print the Slurm commands without running them.")
@click.argument("file", type=click.Path())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(file: str, args: tuple[str, ...], cluster: str | None, detach: bool, dry_run: bool) -> None:
    """Submit FILE: a job file (`job.yaml`, whose keys are the options of `run`), or any sbatch script, unchanged.

    For a job file, the command follows the run to its end, as `run` does. For an sbatch script, it passes ARGS to the
    script and prints the job id.

    \b
    dalsegno submit job.yaml
    dalsegno submit --detach job.yaml
    dalsegno submit train.sh --lr 1e-4
    """
    if file.endswith((".yaml", ".yml")):
        raise SystemExit(_submit_job(file, args, cluster, detach, dry_run))
    _check_script(file)
    if detach or dry_run:
        raise UsageError(
            "`--detach` and `--dry-run` are for job files", hint="an sbatch script is passed to Slurm unchanged"
        )
    _submit_script(file, args, cluster)


def _submit_job(file: str, args: tuple[str, ...], cluster: str | None, detach: bool, dry_run: bool) -> int:
    from dalsegno.cli.training.submission import hand_over
    from dalsegno.runs.submit.job_file import load_job
    from dalsegno.runs.submit.options import options_from_env

    if args:
        raise UsageError("a job file takes no arguments", hint="write them in the file: `args: --lr 0.1`")
    over = {**options_from_env(os.environ), **({"detach": True} if detach else {})}
    return hand_over(load_job(file, over), cluster, dry_run)


def _submit_script(file: str, args: tuple[str, ...], cluster: str | None) -> None:
    """Submit the script. A bare name gets `./` in front, so that sbatch does not search PATH."""
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
