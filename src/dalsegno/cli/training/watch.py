"""Watch a run: read the status that its coordinator writes. If the run waits, or its coordinator is missing or silent,
also ask Slurm or the controller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from dalsegno.errors import DalsegnoError
from dalsegno.runs import journal
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause, RunPhase, RunStatus, is_over, read_status, silent_s
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.slurm.facts import JobInfo

GONE = "lost: its cluster is gone"
SILENT_S = 30.0  # after this long without a new status, ask Slurm whether the coordinator's job exists
GONE_S = 5.0  # how long to wait for the last status after the run's job has left the queue
DOWN_GRACE_S = 2.0  # how long to wait for a `down` in progress, which writes the last status of each run
NOT_STARTED_S = 60.0  # time limit for the start of a coordinator, which normally takes less than a second


class SlurmQueries(Protocol):
    """The queries to Slurm that `RunWatch` needs."""

    def jobs(self) -> list[JobInfo]: ...


class RunLost(DalsegnoError):
    """The error that the run's folder, cluster or coordinator is missing or silent, so that the end of the run may
    never be recorded."""


class RunWatch:
    """The poller of one run's status. It raises RunLost if the run's end may never be recorded."""

    def __init__(
        self,
        run: RunFolder,
        queue: SlurmQueries,
        *,
        on_head: bool,
        answers: Callable[[], bool],
        no_cluster: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run = run
        self._queue = queue
        self._on_head = on_head
        self._answers = answers  # returns whether the controller answers
        self._no_cluster = no_cluster  # returns whether the run's cluster was removed
        self._no_cluster_since: float | None = None
        self._next_question = 0.0
        self._gone_since: float | None = None
        self._queued: tuple[RunPhase, str] | None = None  # phase and message from squeue

    def poll(self, now: float) -> RunStatus:
        status = read_status(self._run.status)
        if status is None:
            hint = f"to see whether a job of the run is left: `squeue --name {self._run.run}`"
            raise RunLost(f"the folder of run {self._run.run} is gone", where=str(self._run.root), hint=hint)
        if not is_over(status):
            self._check_cluster(now)
        speaks = status.coordinator_pid != 0 and now - status.updated < SILENT_S
        if is_over(status) or (speaks and status.phase is not RunPhase.WAITING):
            self._gone_since, self._queued = None, None
            return status
        self._ask(status, now)
        return self._with_queue_state(status)

    def _check_cluster(self, now: float) -> None:
        self._no_cluster_since = (self._no_cluster_since or now) if self._no_cluster() else None
        if self._no_cluster_since is not None and now - self._no_cluster_since >= DOWN_GRACE_S:
            hint = f"its output is kept: `dalsegno logs {self._run.run}`"
            raise RunLost(f"run {self._run.run} is {GONE}", hint=hint)

    def _with_queue_state(self, status: RunStatus) -> RunStatus:
        """Return the status of a run. If the run waits, take the message from squeue. If the run also has no
        coordinator yet, take the phase from squeue, too."""
        if self._queued is None or status.phase is not RunPhase.WAITING:
            return status
        phase, message = self._queued
        if not status.coordinator_pid:
            return replace(status, phase=phase, message=message, cause=RunCause.OTHER)
        waiting = replace(status, message=message, cause=RunCause.OTHER)
        return waiting if phase is RunPhase.WAITING else status

    def _ask(self, status: RunStatus, now: float) -> None:
        if now < self._next_question:
            return
        self._next_question = now + (2.0 if status.phase is RunPhase.WAITING else 15.0)
        if self._on_head and not status.coordinator_pid:
            self._ask_controller(status, now)
        else:
            self._ask_queue(status, now)

    def _ask_controller(self, status: RunStatus, now: float) -> None:
        if now - status.created < NOT_STARTED_S:
            return
        state = "answers, but has not started a coordinator" if self._answers() else "does not answer"
        raise RunLost(
            f"run {self._run.run} was submitted, but the cluster's controller {state}",
            hint=f"check the daemons with `dalsegno status`, or cancel the run: `dalsegno cancel {self._run.run}`",
        )

    def _ask_queue(self, status: RunStatus, now: float) -> None:
        with contextlib.suppress(DalsegnoError):  # if Slurm does not answer, keep what is known about the run
            jobs = jobs_of(self._run, self._queue.jobs())
            self._queued = queue_phase(jobs)
            # The controller restarts a coordinator on the head node even if the run has no job.
            self._gone_since = None if jobs or self._on_head else (self._gone_since or now)
        silent = silent_s(status, now)
        if silent is not None:
            why = f"see {self._run.coordinator_log}" if self._on_head else "its host may be down"
            raise RunLost(
                f"the coordinator of run {self._run.run} has been silent for {silent:.0f} s",
                hint=f"{why}; to end the run: `dalsegno cancel {self._run.run}`",
            )
        if self._gone_since is not None and now - self._gone_since >= GONE_S:
            raise RunLost(
                f"no job of run {self._run.run} is left, and its coordinator did not report how the run ended",
                hint=f"see the job's output in {self._run.root}/job-*.log",
            )


def find_status(run: RunFolder) -> RunStatus | None:
    """Return the status of a run; None if there is none or it cannot be read."""
    with contextlib.suppress(DalsegnoError, OSError):
        return read_status(run.status)
    return None


def is_under_way(run: RunFolder) -> bool:
    status = find_status(run)
    return status is not None and not is_over(status)


def mark_lost(status: RunStatus) -> RunStatus:
    """Return the final status of a run whose cluster was removed before the end of the run was recorded."""
    from dalsegno.runs.submit.prepare import aborted_status

    return (
        status if is_over(status) else aborted_status(status, status.updated, TERMINATED, GONE, RunCause.CLUSTER_GONE)
    )


def cluster_is_gone(run: RunFolder) -> bool:
    """Return whether a run's cluster was removed; False if this user may not read the run's files."""
    from dalsegno.cluster import is_gone
    from dalsegno.runs.submit.prepare import read_environment, read_plan

    with contextlib.suppress(DalsegnoError, OSError):
        return is_gone(read_environment(run), read_plan(run).cluster)
    return False


def jobs_of(run: RunFolder, jobs: Sequence[JobInfo]) -> list[JobInfo]:
    """Return the run's active jobs: they have the run's id as their name, and belong to its owner.

    Anybody can give a job that name. A run neither waits for another user's job nor tries to cancel it.
    """
    owner = run.root.stat().st_uid
    return [job for job in jobs if job.name == run.run and job.uid == owner and not job.state.ended]


def queue_phase(jobs: Sequence[JobInfo]) -> tuple[RunPhase, str] | None:
    """Return the phase of a run by its jobs in squeue, and a message about the first job; None if there are no jobs."""
    from dalsegno.slurm.facts import JobState

    if not jobs:
        return None
    job = jobs[0]
    if job.state is JobState.PENDING:
        return RunPhase.WAITING, f"{job.reason or 'no reason given yet'} (job {job.id})"
    return RunPhase.STARTING, f"job {job.id} has its nodes"


def job_ids(run: RunFolder, status: RunStatus) -> list[int]:
    """Return the ids of the run's Slurm jobs. If it has none now, return those of its past jobs."""
    if status.jobs:
        return list(status.jobs)
    had = [entry for entry in journal.read(run.journal) if entry.get("event") in (RunEvent.SUBMITTED, RunEvent.GRANTED)]
    return list(dict.fromkeys(job for entry in had if isinstance(job := entry.get("job"), int)))
