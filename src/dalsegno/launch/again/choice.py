"""What is to become of a step that has ended with another code than 0. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.slurm.facts import JobInfo, JobState

LOOK_S = 5.0  # a task may die of a failure before anyone else has noticed it, 1.6 s at the worst
SETTLE_S = 60.0  # how long Slurm has for what it makes of a failed node
MOST = 10  # times, for one srun, and for one batch job
_MEANT = {JobState.CANCELLED, JobState.TIMEOUT, JobState.DEADLINE, JobState.PREEMPTED, JobState.OUT_OF_MEMORY}
_PASSING = {JobState.COMPLETING, JobState.CONFIGURING, JobState.RESIZING, JobState.SIGNALING}


@dataclass(frozen=True)
class Leave:
    """The step is over. `why` is worth a line where a node has failed."""

    why: str = ""
    ends: bool = False  # and Slurm is about to end the script that it is part of


@dataclass(frozen=True)
class Again:
    """Start the step again: in its job, not on `without`; or, `alone`, in a new job that is like the old one."""

    job: JobInfo
    without: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class Requeue:
    """Have Slurm start the batch script again, on other nodes."""

    why: str


Choice = Leave | Again | Requeue


@dataclass(frozen=True)
class Seen:
    """The step's nodes and its job, as they are now, and which nodes have failed since the step began."""

    nodes: tuple[str, ...]
    job: JobInfo | None
    failed: Mapping[str, str] = field(default_factory=dict)  # of the step's nodes: why; also those that are back by now
    bad: Mapping[str, str] = field(default_factory=dict)  # now, of the step's and the job's
    unsettled: tuple[str, ...] = ()
    for_s: float = 0.0  # since the step's end
    times: int = 0  # that this srun has started it again
    restarts: int = 0  # of the job
    hung_up: bool = False  # as `salloc` does on what runs in its terminal, when the allocation has ended


def choose(seen: Seen) -> Choice | None:
    """None: it is too early to say."""
    if seen.job is None or seen.job.state in _MEANT:
        return Leave()
    if seen.hung_up and seen.job.state is JobState.RUNNING:
        return Leave()
    if not seen.failed and seen.job.state is not JobState.NODE_FAIL:
        return None if seen.for_s < LOOK_S else Leave()
    if seen.for_s < SETTLE_S and (seen.unsettled or seen.job.state in _PASSING):
        return None
    if seen.job.state is JobState.RUNNING:
        return _in_its_job(seen, seen.job)
    if seen.job.batch:
        anew = seen.job.state is JobState.PENDING
        return Leave(f"job {seen.job.id} {'starts anew' if anew else 'has ended with it'}", ends=anew)
    return Again(seen.job, alone=True) if seen.times < MOST else _enough(seen.times)


def _in_its_job(seen: Seen, job: JobInfo) -> Choice:
    healthy = [name for name in job.nodes if name not in seen.bad]
    if len(healthy) >= len(seen.nodes):
        without = tuple(name for name in job.nodes if name in seen.bad)
        return Again(job, without) if seen.times < MOST else _enough(seen.times)
    if job.batch and seen.restarts >= MOST:
        return _enough(seen.restarts)
    why = f"job {job.id} has {len(healthy)} of the {len(seen.nodes)} healthy nodes that the step needs"
    return Requeue(why) if job.batch else Leave(f"{why}, and only batch jobs can be requeued")


def _enough(times: int) -> Leave:
    return Leave(f"it has been started again {times} times, and is not any more")
