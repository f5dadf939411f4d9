"""`dalsegno cancel`: cancel runs and wait until they have ended."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dalsegno.cli import out
from dalsegno.cli.controller_requests import is_silence
from dalsegno.cli.training.watch import cluster_is_gone, jobs_of
from dalsegno.errors import CommandFailed, DalsegnoError
from dalsegno.runs.status import is_over
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.status import RunStatus
    from dalsegno.slurm.client import SlurmClient
    from dalsegno.targets.base import Say

WAIT_S = 15.0
END_TIMEOUT_S = 5.0
LAST_STATUS_S = 2.0  # a coordinator writes its last status within this time after its job has ended, or never


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
def command(runs: tuple[str, ...]) -> None:
    """Cancel each RUN with all its processes and Slurm jobs, and wait until it has ended.

    RUN is a run id or the start of one. If several ids start with it, the run that has not ended is taken.

    \b
    dalsegno cancel train-k3f9x
    """
    from dalsegno.cluster import runs_home
    from dalsegno.runs.submit.prepare import find_run

    for run in [find_run(runs_home(), name, prefer=lambda run: not is_over(_status(run))) for name in runs]:
        cancel_run(run)


def cancel_run(run: RunFolder) -> None:
    """Cancel the run and wait for its end. A run that has already ended is not an error."""
    status = _status(run)
    if is_over(status):
        out.talk(f"run {run.run} has ended already: {status.message or f'exit code {status.exit_code}'}")
        return
    with out.progress() as say:
        end_run(run, say)
    out.talk(f"run {run.run} is cancelled")


def end_run(run: RunFolder, say: Say) -> None:
    """End the run with all its processes and Slurm jobs, and wait until they have ended."""
    _mark(run)
    _end(run, _status(run), say)


def _mark(run: RunFolder) -> None:
    """Write the file that tells the run's coordinator to end the run and prevents the start of another coordinator."""
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
        say(f"asking {run.run} to end")
        if _ends_by_itself(run):
            return
    if silent:
        raise _noted(run)
    try:
        _end_jobs(run, here.client if here else None, say)
    except CommandFailed as fault:
        raise _noted(run) if is_silence(fault) else fault from None


def _noted(run: RunFolder) -> DalsegnoError:
    hint = f"start slurmctld with `dalsegno up`, and the run ends; or run `dalsegno cancel {run.run}` again later"
    return DalsegnoError(
        f"slurmctld does not answer: run {run.run} has not ended yet, but the request is recorded", hint=hint
    )


def _end_jobs(run: RunFolder, slurm: SlurmClient | None, say: Say) -> None:
    ids = _jobs_left(run, slurm)  # search by name, because Slurm may have reused the run's old job ids
    say(f"cancelling job {', '.join(map(str, ids))}" if ids else f"cancelling {run.run}")
    if slurm:
        slurm.cancel(*ids)
    if not _wait(run, slurm):
        _write_end(run, slurm)


def _here(run: RunFolder) -> SlurmHere | None:
    """Return the run's Slurm; None if its slurm.conf is missing, or if the run's cluster was removed. A later cluster
    with the same name does not count."""
    from dalsegno.cluster import slurm_of
    from dalsegno.runs.submit.prepare import read_environment

    here = slurm_of(read_environment(run))
    settings = here.env.get("SLURM_CONF")
    there = (not settings or Path(settings).exists()) and not cluster_is_gone(run)
    return here if there else None


def _jobs_left(run: RunFolder, slurm: SlurmClient | None) -> list[int]:
    return [job.id for job in jobs_of(run, slurm.jobs())] if slurm else []


def _ends_by_itself(run: RunFolder) -> bool:
    """Wait up to END_TIMEOUT_S for the coordinator to end the run, and return whether it did.

    The coordinator ends the workers, then the agents, then the jobs, and writes the status. `scancel` comes later,
    because it would kill a coordinator that runs in a job before the coordinator has done so.
    """
    until = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < until and not is_over(_status(run)):
        time.sleep(0.1)
    return is_over(_status(run))


def _wait(run: RunFolder, slurm: SlurmClient | None) -> bool:
    """Wait for the coordinator to record the end, and return whether it did. Return early if no coordinator can run."""
    from dalsegno.runs.submit.prepare import read_plan

    on_head = read_plan(run).on_head and slurm is not None
    start, alone_since = time.monotonic(), None
    while time.monotonic() < start + WAIT_S:
        if is_over(_status(run)):
            return True
        if not on_head and not _jobs_left(run, slurm):
            alone_since = alone_since or time.monotonic()
            if time.monotonic() >= alone_since + (LAST_STATUS_S if slurm else 0):
                return False
        time.sleep(0.2)
    return is_over(_status(run))


def _write_end(run: RunFolder, slurm: SlurmClient | None) -> None:
    """Record the end of the run. Raise an error if a job of the run is left: a coordinator in that job may still record
    the end."""
    from dalsegno.runs.status import RunCause, write_status
    from dalsegno.runs.submit.prepare import aborted_status

    left = _jobs_left(run, slurm)
    if left:
        jobs = ", ".join(map(str, left))
        hint = "Slurm kills the remaining processes after KillWait, 30 s; `dalsegno runs` shows when the run has ended"
        raise DalsegnoError(f"run {run.run} was told to end, but job {jobs} has not ended", hint=hint)
    write_status(run.status, aborted_status(_status(run), time.time(), TERMINATED, "cancelled", RunCause.CANCELLED))


def _status(run: RunFolder) -> RunStatus:
    from dalsegno.runs.status import read_status

    status = read_status(run.status)
    if status is None:
        raise DalsegnoError(f"run {run.run} has no status", hint=f"check that {run.root} is the folder of a run")
    return status
