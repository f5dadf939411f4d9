"""Decide whether a failed step is restarted, and where."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.runs.coordinator.nodes.node_rules import drained_for_repair
from dalsegno.slurm.facts import JobInfo, JobState, NodeFlag, NodeInfo

DETECTION_S = 5.0  # time to wait for a report of a node failure; it arrives up to 1.6 s after a task is killed
SETTLE_S = 60.0  # time for Slurm to handle a failed node
MAX_RESTARTS = 10  # limit on restarts by one srun, and on restarts of one batch job
_INTENDED = {JobState.CANCELLED, JobState.TIMEOUT, JobState.DEADLINE, JobState.PREEMPTED, JobState.OUT_OF_MEMORY}
_TRANSIENT = {JobState.COMPLETING, JobState.CONFIGURING, JobState.RESIZING, JobState.SIGNALING}


@dataclass(frozen=True)
class LeaveStep:
    """Do not restart the step. `why` is shown if it is not empty."""

    why: str = ""
    ends: bool = False  # whether Slurm is about to end the batch script that contains the step


@dataclass(frozen=True)
class StartAgain:
    """Restart the step in its job, without the nodes in `without`.

    If `alone` is set, restart the step in a new job that has the options of the old job.
    """

    job: JobInfo
    without: tuple[str, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class RequeueJob:
    """Requeue the job, so that Slurm runs the batch script again on other nodes."""

    why: str


Choice = LeaveStep | StartAgain | RequeueJob


@dataclass(frozen=True)
class StepFacts:
    """The step's nodes, the current state of its job, and the nodes that have failed."""

    nodes: tuple[str, ...]
    job: JobInfo | None
    # Nodes of the step that failed at any time since the step ended, and why. Some may be in service again.
    failed: Mapping[str, str] = field(default_factory=dict)
    bad: Mapping[str, str] = field(default_factory=dict)  # nodes of the step or the job that are bad now, and why
    unsettled: tuple[str, ...] = ()  # failed nodes that Slurm has not handled yet
    for_s: float = 0.0  # seconds since the step ended
    times: int = 0  # how often this srun has restarted the step
    restarts: int = 0  # how often Slurm has restarted the job
    hung_up: bool = False  # whether srun got SIGHUP, which `salloc` sends when its allocation ends


def choose(seen: StepFacts) -> Choice | None:
    """Return the decision; None if it is too early to decide."""
    if seen.job is None or seen.job.state in _INTENDED:
        return LeaveStep()
    if seen.hung_up and seen.job.state is JobState.RUNNING:
        return LeaveStep()
    if not seen.failed and seen.job.state is not JobState.NODE_FAIL:
        return None if seen.for_s < DETECTION_S else LeaveStep()
    if seen.for_s < SETTLE_S and (seen.unsettled or seen.job.state in _TRANSIENT):
        return None
    if seen.job.state is JobState.RUNNING:
        return _in_its_job(seen, seen.job)
    if seen.job.batch:
        requeued = seen.job.state is JobState.PENDING
        return LeaveStep(f"job {seen.job.id} {'was requeued' if requeued else 'has ended with it'}", ends=requeued)
    return StartAgain(seen.job, alone=True) if seen.times < MAX_RESTARTS else _limit_reached(seen.times)


def _in_its_job(seen: StepFacts, job: JobInfo) -> Choice:
    healthy = [name for name in job.nodes if name not in seen.bad]
    if len(healthy) >= len(seen.nodes):
        without = tuple(name for name in job.nodes if name in seen.bad)
        return StartAgain(job, without) if seen.times < MAX_RESTARTS else _limit_reached(seen.times)
    if job.batch and seen.restarts >= MAX_RESTARTS:
        return _limit_reached(seen.restarts)
    why = f"job {job.id} has {len(healthy)} of the {len(seen.nodes)} healthy nodes that the step needs"
    return RequeueJob(why) if job.batch else LeaveStep(f"{why}, and only batch jobs can be requeued")


def _limit_reached(times: int) -> LeaveStep:
    return LeaveStep(f"it was restarted {times} times, which is the limit")


# Failed nodes


_GONE = {NodeFlag.FAIL, NodeFlag.POWERED_DOWN, NodeFlag.POWERING_DOWN, NodeFlag.REBOOT_ISSUED, NodeFlag.INVALID_REG}


def failures(nodes: Iterable[NodeInfo], silent: Collection[str]) -> dict[str, str]:
    """Return the failed nodes and the reasons. A node that a user has drained is not a failed node."""
    found = {node.name: _why(node, silent) for node in nodes}
    return {name: why for name, why in found.items() if why}


def unsettled(nodes: Iterable[NodeInfo], bad: Collection[str]) -> list[str]:
    """Return the bad nodes that Slurm has neither marked down nor drained yet."""
    return [node.name for node in nodes if node.name in bad and not node.down and not node.draining]


def _why(node: NodeInfo, silent: Collection[str]) -> str:
    if reason := drained_for_repair([node]).get(node.name):
        return reason
    if node.down:
        return node.reason or "down"
    if node.name in silent or not node.responding:
        return "does not answer"
    return node.state_text if node.flags & _GONE else ""


# The command that restarts a step


_OLD = ("JOB_ID", "JOBID", "JOB_NODELIST", "NODELIST", "NODE_ALIASES", "TASKS_PER_NODE", "JOB_CPUS_PER_NODE")


def arguments(argv: Sequence[str], again: StartAgain) -> list[str]:
    """Return srun's arguments for a restart. Our `--exclude` comes first, so that the user's own overrides it."""
    return [argv[0], *([f"--exclude={','.join(again.without)}"] if again.without else []), *argv[1:]]


def environment(env: Mapping[str, str], again: StartAgain) -> dict[str, str]:
    """Return srun's environment.

    If the step gets a new job, variables with the old job's options replace the variables of the old allocation.
    """
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
