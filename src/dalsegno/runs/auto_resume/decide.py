"""The decision on a step that ended with a code other than 0. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.hostlist import expand
from dalsegno.runs.coordinator.node_rules import drained_for_repair
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo

LOOK_S = 5.0  # a task may die of a failure before it is detected, up to 1.6 s later
SETTLE_S = 60.0  # time for Slurm to handle a failed node
MOST = 10  # restarts, for one srun and for one batch job
_MEANT = {JobState.CANCELLED, JobState.TIMEOUT, JobState.DEADLINE, JobState.PREEMPTED, JobState.OUT_OF_MEMORY}
_PASSING = {JobState.COMPLETING, JobState.CONFIGURING, JobState.RESIZING, JobState.SIGNALING}


@dataclass(frozen=True)
class LeaveStep:
    """Leave the step ended. `why` is shown if a node has failed."""

    why: str = ""
    ends: bool = False  # Slurm is about to end the script that contains the step


@dataclass(frozen=True)
class StartAgain:
    """Start the step again in its job, but not on the nodes `without`; if `alone`, in a new job like the old one."""

    job: JobInfo
    without: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class RequeueJob:
    """Have Slurm start the batch script again, on other nodes."""

    why: str


Choice = LeaveStep | StartAgain | RequeueJob


@dataclass(frozen=True)
class StepFacts:
    """The step's nodes and its job, as they are now, and which nodes have failed since the step began."""

    nodes: tuple[str, ...]
    job: JobInfo | None
    # why, by node of the step; includes nodes that are back by now
    failed: Mapping[str, str] = field(default_factory=dict)
    bad: Mapping[str, str] = field(default_factory=dict)  # now, of the step's and the job's nodes
    unsettled: tuple[str, ...] = ()
    for_s: float = 0.0  # since the step's end
    times: int = 0  # how often this srun has started it again
    restarts: int = 0  # of the job
    hung_up: bool = False  # as `salloc` does to processes in its terminal when the allocation has ended


def choose(seen: StepFacts) -> Choice | None:
    """Return the decision; None while it is too early."""
    if seen.job is None or seen.job.state in _MEANT:
        return LeaveStep()
    if seen.hung_up and seen.job.state is JobState.RUNNING:
        return LeaveStep()
    if not seen.failed and seen.job.state is not JobState.NODE_FAIL:
        return None if seen.for_s < LOOK_S else LeaveStep()
    if seen.for_s < SETTLE_S and (seen.unsettled or seen.job.state in _PASSING):
        return None
    if seen.job.state is JobState.RUNNING:
        return _in_its_job(seen, seen.job)
    if seen.job.batch:
        requeued = seen.job.state is JobState.PENDING
        return LeaveStep(f"job {seen.job.id} {'was requeued' if requeued else 'has ended with it'}", ends=requeued)
    return StartAgain(seen.job, alone=True) if seen.times < MOST else _enough(seen.times)


def _in_its_job(seen: StepFacts, job: JobInfo) -> Choice:
    healthy = [name for name in job.nodes if name not in seen.bad]
    if len(healthy) >= len(seen.nodes):
        without = tuple(name for name in job.nodes if name in seen.bad)
        return StartAgain(job, without) if seen.times < MOST else _enough(seen.times)
    if job.batch and seen.restarts >= MOST:
        return _enough(seen.restarts)
    why = f"job {job.id} has {len(healthy)} of the {len(seen.nodes)} healthy nodes that the step needs"
    return RequeueJob(why) if job.batch else LeaveStep(f"{why}, and only batch jobs can be requeued")


def _enough(times: int) -> LeaveStep:
    return LeaveStep(f"it was restarted {times} times, which is the limit")


# Failed nodes. Pure.


_GONE = {NodeFlag.FAIL, NodeFlag.POWERED_DOWN, NodeFlag.POWERING_DOWN, NodeFlag.REBOOT_ISSUED, NodeFlag.INVALID_REG}


def failures(nodes: Iterable[NodeInfo], silent: Collection[str]) -> dict[str, str]:
    """Return why nothing should be started on a node, by node. A drain by somebody else is not a failure."""
    found = {node.name: _why(node, silent) for node in nodes}
    return {name: why for name, why in found.items() if why}


def unsettled(nodes: Iterable[NodeInfo], bad: Collection[str]) -> list[str]:
    """Return the nodes that have failed but that Slurm has not handled yet."""
    return [node.name for node in nodes if node.name in bad and not node.down and not node.draining]


def _why(node: NodeInfo, silent: Collection[str]) -> str:
    if reason := drained_for_repair([node]).get(node.name):
        return reason
    if node.down:
        return node.reason or "down"
    if node.name in silent or not node.responding:
        return "does not answer"
    return node.state_text if node.flags & _GONE else ""


# srun's notes on the step that it starts: `JOB STEP NODES`. Pure.


NOTES = "DALSEGNO_RESUME_NOTES"  # the descriptor to write notes to; our Slurm plugin hides it from the tasks


@dataclass(frozen=True)
class SrunStep:
    job: int
    id: int
    nodes: tuple[str, ...]


def read_notes(text: str) -> SrunStep | None:
    """Return the step; None if there was none, or for one across several jobs (a heterogeneous job)."""
    fields = [line.split(" ") for line in text.splitlines()]
    if len(fields) != 1 or len(fields[0]) != 3 or not all(word.isdigit() for word in fields[0][:2]):
        return None
    return SrunStep(int(fields[0][0]), int(fields[0][1]), tuple(expand(fields[0][2])))


# The command that restarts a step. Pure.


_OLD = ("JOB_ID", "JOBID", "JOB_NODELIST", "NODELIST", "NODE_ALIASES", "TASKS_PER_NODE", "JOB_CPUS_PER_NODE")


def arguments(argv: Sequence[str], again: StartAgain) -> list[str]:
    """Return srun's arguments, ours first, so that the user's own exclusions take precedence."""
    return [argv[0], *([f"--exclude={','.join(again.without)}"] if again.without else []), *argv[1:]]


def environment(env: Mapping[str, str], again: StartAgain) -> dict[str, str]:
    """Return srun's environment without the old allocation; the other variables give the new one its shape."""
    if not again.alone or "SLURM_JOB_ID" not in env:
        return dict(env)
    old = {f"SLURM_{name}" for name in _OLD}
    return {**_job_options(again.job), **{name: value for name, value in env.items() if name not in old}}


def _job_options(job: JobInfo) -> dict[str, str]:
    limit = "" if job.time_limit_s is None else str(max(1, job.time_limit_s // 60))
    known = {
        "SLURM_PARTITION": job.partition, "SLURM_ACCOUNT": job.account, "SLURM_QOS": job.qos,
        "SLURM_RESERVATION": job.reservation, "SLURM_TIMELIMIT": limit,
    }  # fmt: skip
    return {name: value for name, value in known.items() if value}
