"""`dalsegno cancel`: end runs, and see them end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.asking import is_silence
from dalsegno.cli.watch import cluster_is_gone, is_over, jobs_of
from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.status import RunStatus
    from dalsegno.slurm.client import SlurmClient
    from dalsegno.targets.base import Say

WAIT_S = 15.0
ORDERLY_S = 5.0
ALONE_S = 2.0  # a coordinator whose job is gone has its last word within this, or never


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
def command(runs: tuple[str, ...]) -> None:
    """Cancel each RUN with all its processes and Slurm jobs, and wait until it has ended.

    RUN is an id, or how an id starts; where several start so, the one that is under way is meant.

    \b
    dalsegno cancel train-k3f9x
    """
    from dalsegno.cluster import runs_home
    from dalsegno.runs.submit.prepare import find_run

    for run in [find_run(runs_home(), name, prefer=lambda run: not is_over(_status(run))) for name in runs]:
        cancel_run(run)


def cancel_run(run: RunFolder) -> None:
    """Ask, and wait until it is so. A run that is over is fine."""
    status = _status(run)
    if is_over(status):
        out.talk(f"run {run.run} was over already: {status.message or f'it ended with code {status.exit_code}'}")
        return
    with out.progress() as say:
        end_run(run, say)
    out.talk(f"run {run.run} is cancelled")


def end_run(run: RunFolder, say: Say) -> None:
    """Returns when it has ended with all that belongs to it."""
    _mark(run)
    _end(run, _status(run), say)


def _mark(run: RunFolder) -> None:
    """What the run's coordinator looks for, and what keeps another from starting."""
    from dalsegno.runs.submit.prepare import check_own
    from dalsegno.system.files import explain

    check_own(run)
    try:
        os.close(os.open(run.cancel, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644))
    except OSError as error:
        raise explain(error, run.cancel) from error


def _end(run: RunFolder, status: RunStatus, say: Say) -> None:
    from dalsegno.cluster import silence
    from dalsegno.runs.submit.prepare import read_plan

    here = _here(run)
    silent = here is not None and silence(here) is not None
    if here and status.coordinator_pid and not (silent and read_plan(run).on_head):
        say(f"asks {run.run} to end")
        if _ends_by_itself(run):
            return
    if silent:
        raise _noted(run)
    try:
        _end_jobs(run, here.client if here else None, say)
    except CommandFailed as fault:
        raise _noted(run) if is_silence(fault) else fault from None


def _noted(run: RunFolder) -> DalsegnoError:
    hint = f"`dalsegno up` starts what is missing, and then it ends; or `dalsegno cancel {run.run}` again"
    return DalsegnoError(f"slurmctld does not answer: run {run.run} is not ended yet, the request is noted", hint=hint)


def _end_jobs(run: RunFolder, slurm: SlurmClient | None, say: Say) -> None:
    ids = _jobs_left(run, slurm)  # by name, not by the ids it has had: those may be another's by now
    say(f"cancels job {', '.join(map(str, ids))}" if ids else f"cancels {run.run}")
    if slurm:
        slurm.cancel(*ids)
    if not _wait(run, slurm):
        _write_end(run, slurm)


def _here(run: RunFolder) -> SlurmHere | None:
    """None if its cluster has been taken down, and all its jobs with it; another of that name is not its own."""
    from dalsegno.cluster import slurm_of
    from dalsegno.runs.submit.prepare import read_environment

    here = slurm_of(read_environment(run))
    settings = here.env.get("SLURM_CONF")
    there = (not settings or Path(settings).exists()) and not cluster_is_gone(run)
    return here if there else None


def _jobs_left(run: RunFolder, slurm: SlurmClient | None) -> list[int]:
    return [job.id for job in jobs_of(run, slurm.jobs())] if slurm else []


def _ends_by_itself(run: RunFolder) -> bool:
    """A coordinator ends workers, agents and jobs in that order, and tells; killed with its job it can do neither."""
    until = time.monotonic() + ORDERLY_S
    while time.monotonic() < until and not is_over(_status(run)):
        time.sleep(0.1)
    return is_over(_status(run))


def _wait(run: RunFolder, slurm: SlurmClient | None) -> bool:
    """Whether its coordinator has told of the end. Not waited for where there can be none: in no job, on no head."""
    from dalsegno.runs.submit.prepare import read_plan

    on_head = read_plan(run).on_head and slurm is not None
    start, alone_since = time.monotonic(), None
    while time.monotonic() < start + WAIT_S:
        if is_over(_status(run)):
            return True
        if not on_head and not _jobs_left(run, slurm):
            alone_since = alone_since or time.monotonic()
            if time.monotonic() >= alone_since + (ALONE_S if slurm else 0):
                return False
        time.sleep(0.2)
    return is_over(_status(run))


def _write_end(run: RunFolder, slurm: SlurmClient | None) -> None:
    """Nobody else will. But not while a job of it lives: its coordinator may still speak."""
    from dalsegno.runs.status import RunCause, write_status
    from dalsegno.runs.submit.prepare import given_up

    left = _jobs_left(run, slurm)
    if left:
        jobs = ", ".join(map(str, left))
        hint = "Slurm kills what does not end by itself after KillWait, 30 s; `dalsegno runs` tells when it is gone"
        raise DalsegnoError(f"run {run.run} is told to end, but job {jobs} is still there", hint=hint)
    write_status(run.status, given_up(_status(run), time.time(), TERMINATED, "cancelled", RunCause.CANCELLED))


def _status(run: RunFolder) -> RunStatus:
    from dalsegno.runs.status import read_status

    status = read_status(run.status)
    if status is None:
        raise DalsegnoError(f"run {run.run} has no status", hint=f"is {run.root} the folder of a run?")
    return status
