"""What is known of a run: what its coordinator tells, and while there is none, what Slurm says of its jobs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from dalsegno.errors import DalsegnoError
from dalsegno.runs import journal
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause, RunPhase, RunStatus, read_status
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.slurm.facts import JobInfo

GONE = "lost: its cluster is gone"
SILENT_S = 30.0  # a coordinator that has told nothing for so long may be gone: then Slurm is asked
LOST_S = 120.0  # one that lives says so every ten seconds
GONE_S = 5.0  # the last word of a coordinator may come a moment after its job has left the queue
TAKEN_DOWN_S = 2.0  # a `down` that is under way has a last word on each run itself
NOT_STARTED_S = 60.0  # a controller starts a coordinator at once


class SlurmQueries(Protocol):
    """All that is asked of Slurm here."""

    def jobs(self) -> list[JobInfo]: ...


class RunLost(DalsegnoError):
    """Nobody looks after the run any more."""


class RunWatch:
    """Looks at one run again and again. Raises RunLost where nobody will ever end it."""

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
        self._answers = answers  # whether the controller does
        self._no_cluster = no_cluster  # whether that of the run has been taken down
        self._no_cluster_since: float | None = None
        self._next_question = 0.0
        self._gone_since: float | None = None
        self._heard: tuple[RunPhase, str] | None = None  # phase and message, as the queue has it

    def look(self, now: float) -> RunStatus:
        status = read_status(self._run.status)
        if status is None:
            hint = f"was it removed? `squeue --name {self._run.run}` shows whether a job of it is left"
            raise RunLost(f"the folder of run {self._run.run} is gone", where=str(self._run.root), hint=hint)
        if not is_over(status):
            self._look_for_cluster(now)
        speaks = status.coordinator_pid != 0 and now - status.updated < SILENT_S
        if is_over(status) or (speaks and status.phase is not RunPhase.WAITING):
            self._gone_since, self._heard = None, None
            return status
        self._ask(status, now)
        return self._with_what_was_heard(status)

    def _look_for_cluster(self, now: float) -> None:
        self._no_cluster_since = (self._no_cluster_since or now) if self._no_cluster() else None
        if self._no_cluster_since is not None and now - self._no_cluster_since >= TAKEN_DOWN_S:
            hint = f"what it said is kept: `dalsegno logs {self._run.run}`"
            raise RunLost(f"run {self._run.run} is {GONE}", hint=hint)

    def _with_what_was_heard(self, status: RunStatus) -> RunStatus:
        """A coordinator knows best; but of a job that waits, only Slurm knows why."""
        if self._heard is None or status.phase is not RunPhase.WAITING:
            return status
        phase, message = self._heard
        if not status.coordinator_pid:
            return replace(status, phase=phase, message=message, cause=RunCause.OTHER)
        heard = replace(status, message=message, cause=RunCause.OTHER)
        return heard if phase is RunPhase.WAITING else status

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
        said = "answers, but has not started its coordinator" if self._answers() else "does not answer"
        raise RunLost(
            f"run {self._run.run} was handed over, but the cluster's controller {said}",
            hint=f"`dalsegno status` shows the daemons, `dalsegno cancel {self._run.run}` gives the run up",
        )

    def _ask_queue(self, status: RunStatus, now: float) -> None:
        with contextlib.suppress(DalsegnoError):  # a Slurm that does not answer now says nothing about the run
            jobs = jobs_of(self._run, self._queue.jobs())
            self._heard = queue_phase(jobs)
            # Of a coordinator on the head the controller takes care, also while it has no job.
            self._gone_since = None if jobs or self._on_head else (self._gone_since or now)
        silent = silent_s(status, now)
        if silent is not None:
            why = f"{self._run.coordinator_log} may say why" if self._on_head else "its host may be gone"
            raise RunLost(
                f"the coordinator of run {self._run.run} has said nothing for {silent:.0f} s",
                hint=f"{why}; `dalsegno cancel {self._run.run}` ends what is left of it",
            )
        if self._gone_since is not None and now - self._gone_since >= GONE_S:
            raise RunLost(
                f"no job of run {self._run.run} is left, and its coordinator has not said how it ended",
                hint=f"what it said is in {self._run.root}/job-*.log",
            )


def is_over(status: RunStatus) -> bool:
    """Whether all of it is gone. A coordinator tells that a run ends before it has cleared up, and then its code."""
    return status.over and status.exit_code is not None


def lost(status: RunStatus) -> RunStatus:
    """The end of a run that nobody wrote down: its cluster is gone, and with it whoever could have."""
    from dalsegno.runs.submit.prepare import given_up

    return status if is_over(status) else given_up(status, status.updated, TERMINATED, GONE, RunCause.CLUSTER_GONE)


def cluster_is_gone(run: RunFolder) -> bool:
    """Whether a run's cluster has been taken down. Somebody else's run tells us nothing."""
    from dalsegno.cluster import is_gone
    from dalsegno.runs.submit.prepare import read_environment, read_plan

    with contextlib.suppress(DalsegnoError, OSError):
        return is_gone(read_environment(run), read_plan(run).cluster)
    return False


def silent_s(status: RunStatus, now: float) -> float | None:
    """For how long a coordinator that should speak has not, once that is too long. While the run waits in the queue
    there may be none."""
    silence = now - status.updated
    speaks = not status.coordinator_pid or status.phase is RunPhase.WAITING or is_over(status) or silence < LOST_S
    return None if speaks else silence


def jobs_of(run: RunFolder, jobs: Sequence[JobInfo]) -> list[JobInfo]:
    """Return the run's jobs that are not over: they have its id as their name, and its owner.

    Anybody can give a job that name. A run does not wait for another user's job, nor try to cancel it.
    """
    owner = run.root.stat().st_uid
    return [job for job in jobs if job.name == run.run and job.uid == owner and not job.state.ended]


def queue_phase(jobs: Sequence[JobInfo]) -> tuple[RunPhase, str] | None:
    """What a run does before its coordinator lives, as squeue tells: its phase, and what it waits for."""
    from dalsegno.slurm.facts import JobState

    if not jobs:
        return None
    job = jobs[0]
    if job.state is JobState.PENDING:
        return RunPhase.WAITING, f"{job.reason or 'no reason given yet'} (job {job.id})"
    return RunPhase.STARTING, f"job {job.id} has its nodes"


def job_ids(run: RunFolder, status: RunStatus) -> list[int]:
    """Slurm's ids of the run's jobs; of a run that has none now, those it had."""
    if status.jobs:
        return list(status.jobs)
    had = [entry for entry in journal.read(run.journal) if entry.get("event") in (RunEvent.SUBMITTED, RunEvent.GRANTED)]
    return list(dict.fromkeys(job for entry in had if isinstance(job := entry.get("job"), int)))


def coordinator_is_dead(status: RunStatus) -> bool:
    """Only where that can be known: on its own host."""
    from dalsegno.system.children import start_ticks

    here = status.coordinator_host == socket.gethostname()
    return bool(status.coordinator_pid) and here and not is_over(status) and start_ticks(status.coordinator_pid) is None
