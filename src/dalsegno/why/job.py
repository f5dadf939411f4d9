"""Explain a Slurm job: why it waits, or how it ended. Pure."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator, Sequence

from dalsegno.runs.comment import JobRole, read_comment
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.messages import PendingReason, parse_pending
from dalsegno.why.answer import AFTER_S, Conclusion, Moment

_NOT_STARTED = 53  # slurmd's code if it cannot create the job's output file or enter its working folder
# The meaning of each reason, and the next command. {job} is the job's id, {part} its partition, {user} its user.
WAITS: dict[PendingReason, tuple[str, str]] = {
    PendingReason.RESOURCES: (
        "it is next in line, but the nodes it needs are busy",
        "squeue -p {part} --states=RUNNING",
    ),
    PendingReason.PRIORITY: ("jobs of higher priority are ahead of it", "sprio -j {job}"),
    PendingReason.DEPENDENCY: ("it waits for another job to end", "scontrol show job {job} | grep Dependency"),
    PendingReason.DEPENDENCY_NEVER_SATISFIED: (
        "the job it depends on did not end as required, so it will never start",
        "scancel {job}",
    ),
    PendingReason.BEGIN_TIME: (
        "it may not start before its begin time, which a requeued job has too",
        "scontrol update jobid={job} starttime=now",
    ),
    PendingReason.JOB_HELD_USER: ("its user has put it on hold", "scontrol release {job}"),
    PendingReason.JOB_HELD_ADMIN: (
        "an administrator has put it on hold, or it failed to start too often",
        "scontrol release {job}",
    ),
    PendingReason.REQ_NODE_NOT_AVAIL: ("nodes it needs are out of service or reserved", "sinfo -R"),
    PendingReason.NODE_DOWN: ("a node it needs is down", "sinfo -R"),
    PendingReason.PARTITION_DOWN: ("its partition is closed", "scontrol show partition {part}"),
    PendingReason.PARTITION_INACTIVE: ("its partition is inactive", "scontrol show partition {part}"),
    PendingReason.PARTITION_NODE_LIMIT: (
        "it requests more nodes than its partition allows",
        "scontrol show partition {part}",
    ),
    PendingReason.PARTITION_TIME_LIMIT: (
        "it requests more time than its partition allows",
        "scontrol show partition {part}",
    ),
    PendingReason.PARTITION_CONFIG: (
        "its request does not match its partition",
        "scontrol show partition {part}",
    ),
    PendingReason.LICENSES: ("a license it needs is in use", "scontrol show licenses"),
    PendingReason.RESERVATION: ("it waits for its reservation to begin", "scontrol show reservation"),
    PendingReason.RESERVATION_DELETED: ("its reservation was deleted", "scancel {job}"),
    PendingReason.INVALID_ACCOUNT: ("its account does not exist", "sacctmgr show associations user={user}"),
    PendingReason.INVALID_QOS: ("its QOS does not exist", "sacctmgr show qos"),
    PendingReason.ASSOC_MAX_JOBS_LIMIT: ("its user runs as many jobs as the account allows", "squeue -u {user}"),
    PendingReason.ASSOC_GRP: ("its account has reached a limit", "sacctmgr show associations user={user}"),
    PendingReason.ASSOC_MAX: (
        "it requests more than its account allows for one job",
        "sacctmgr show associations user={user}",
    ),
    PendingReason.QOS_MAX_JOBS_PER_USER_LIMIT: ("its user runs as many jobs as the QOS allows", "squeue -u {user}"),
    PendingReason.QOS_GRP: ("the jobs of its QOS have reached a limit", "sacctmgr show qos"),
    PendingReason.QOS_MAX: ("it requests more than its QOS allows", "sacctmgr show qos"),
    PendingReason.QOS_MIN: ("it requests less than its QOS requires", "sacctmgr show qos"),
    PendingReason.QOS_NOT_ALLOWED: ("its QOS is not allowed in its partition", "scontrol show partition {part}"),
    PendingReason.BAD_CONSTRAINTS: ("no node has the features it requests", "sinfo -o '%N %f'"),
    PendingReason.LAUNCH_FAILED: ("it could not be started on a node and is on hold", "scontrol release {job}"),
    PendingReason.PROLOG: ("its prolog is running", "sinfo -R"),
    PendingReason.CLEANING: ("its previous attempt is still being cleaned up", "squeue -j {job}"),
    PendingReason.JOB_ARRAY_TASK_LIMIT: ("its array already runs as many tasks as it may at once", "squeue -j {job}"),
    PendingReason.JOB_HOLD_MAX_REQUEUE: ("it was requeued too often and is on hold", "scontrol release {job}"),
    PendingReason.SCHED_DEFER: ("Slurm defers scheduling for a moment", ""),
    PendingReason.NOT_LOOKED_AT: ("Slurm has not considered it yet", "squeue -j {job}"),
}


def why_it_waits(reason: str, job: str, partition: str, user: str) -> Conclusion:
    known = parse_pending(reason)
    if known not in WAITS:
        bare = reason.strip("()")
        sentence = f"Slurm's reason is `{bare}`" if bare else "Slurm has not given a reason yet"
        return Conclusion(sentence, f"scontrol show job {job}")
    sentence, command = WAITS[known]
    return Conclusion(sentence, command.format(job=job, part=partition, user=user))


def explain_job(job: JobInfo, run: str = "") -> Conclusion:
    """Return the verdict on a job. `run` is the run that the job belongs to; "" if it belongs to none."""
    found = _by_state(job)
    sentence = f"{found.sentence}{_of_run(job, run)}{_excluded(job, run)}"
    return Conclusion(sentence, f"dalsegno why {run}" if run and job.state is not JobState.PENDING else found.next)


def _of_run(job: JobInfo, run: str) -> str:
    if not run:
        return ""
    comment = read_comment(job.comment)
    if comment and comment.role is JobRole.JOIN:
        return f"; run {run} submitted it to replace a lost node"
    follows = comment is not None and comment.role is JobRole.NEXT
    return f"; it is the next job of run {run}" if follows else f"; it is the job of run {run}"


def _excluded(job: JobInfo, run: str) -> str:
    """Return a clause about the nodes that a pending job excludes: the job may wait although these nodes are free."""
    if job.state is not JobState.PENDING or not job.excluded:
        return ""
    text = f"run {run} excludes {{}}: nodes it uses or has left" if run else "nodes are excluded: {}"
    return f"; {text.format(_some(job.excluded))}"


def _by_state(job: JobInfo) -> Conclusion:
    if job.state is JobState.PENDING:
        found = why_it_waits(job.reason, job.label, job.partition, job.user)
        return Conclusion(f"job {job.label} waits: {found.sentence}", found.next)
    if never_started(job):
        sentence = "could not be started: Slurm cannot create its output file, or cannot enter its working folder"
        folder = os.path.dirname(job.stdout) or job.work_dir
        return Conclusion(
            f"job {job.label} {sentence}",
            f"ls -ld {shlex.quote(folder)}" if folder else f"scontrol show job {job.label}",
        )
    if job.state is JobState.FAILED:
        return Conclusion(f"job {job.label} ended with {exit_of(job)}: its program failed", _output_command(job))
    if job.state in _ENDS:
        sentence, command = _ENDS[job.state]
        return Conclusion(
            f"job {job.label} {sentence}", command.format(job=job.label) if command else _output_command(job)
        )
    return Conclusion(f"job {job.label} is {job.state.value.lower()}", f"scontrol show job {job.label}")


_ENDS = {
    JobState.RUNNING: ("is running", "squeue -j {job}"),
    JobState.COMPLETED: ("is done", ""),
    JobState.CANCELLED: ("was cancelled", "sacct -j {job} --format=JobID,State,End,ExitCode"),
    JobState.TIMEOUT: (
        "reached its time limit; `--time` gives it more, and `dalsegno run` resumes in the next job", "",
    ),
    JobState.OUT_OF_MEMORY: ("used more memory than it requested; `--mem` gives it more", ""),
    JobState.NODE_FAIL: ("lost a node; `dalsegno run` would have continued without it", "sinfo -R"),
    JobState.PREEMPTED: ("was preempted by a job of higher priority; `--requeue` queues it again", ""),
    JobState.BOOT_FAIL: ("got a node that did not boot", "sinfo -R"),
    JobState.LAUNCH_FAILED: ("could not be started on a node", "sinfo -R"),
    JobState.DEADLINE: ("could not have ended before its deadline", ""),
    JobState.REQUEUE_HOLD: ("was requeued and is on hold", "scontrol release {job}"),
    JobState.SUSPENDED: ("is suspended", "scontrol resume {job}"),
}  # fmt: skip


def aftermath_s(job: JobInfo) -> float:
    """Return how many seconds after a job's end a node event may still explain the end; 1 if the job did not fail."""
    return 1.0 if job.state in (JobState.COMPLETED, JobState.CANCELLED) else AFTER_S


def never_started(job: JobInfo) -> bool:
    """Return whether slurmd could not start the batch script. The exit code is then 0:53, in which 53 is not a
    signal."""
    return job.state is JobState.FAILED and not job.exit_code and job.exit_signal == _NOT_STARTED


def exit_of(job: JobInfo) -> str:
    """Return a job's exit code or signal in words."""
    if never_started(job):
        return f"exit code 0:{_NOT_STARTED}"
    if job.exit_signal:
        try:
            return signal.Signals(job.exit_signal).name
        except ValueError:
            return f"signal {job.exit_signal}"
    return f"exit code {job.exit_code}"


def _output_command(job: JobInfo) -> str:
    """Return the command that shows the job's output."""
    output = job.stderr or job.stdout
    return f"tail {shlex.quote(output)}" if output else f"sacct -j {job.label} --format=JobID,State,ExitCode,NodeList"


def moments_of_job(job: JobInfo) -> Iterator[Moment]:
    if job.submitted_at:
        yield Moment(job.submitted_at, "slurm", f"job {job.label} of {job.user} was submitted to {job.partition}")
    if job.started_at and job.state is not JobState.PENDING:
        yield Moment(job.started_at, "slurm", f"job {job.label} started on {_nodes(job)}")
    if job.preempted_at:
        yield Moment(job.preempted_at, "slurm", f"job {job.label} was preempted")
    if job.ends_at and job.state.ended:
        yield Moment(job.ends_at, "slurm", f"job {job.label} ended: {job.state.value}, {exit_of(job)}")


def _nodes(job: JobInfo) -> str:
    return _some(job.nodes) if job.nodes else f"{job.node_count} nodes"


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:8]) + (" …" if len(nodes) > 8 else "")
