"""A job of Slurm's: why it waits, or how it ended. Pure."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence

from dalsegno.runs.comment import JobRole, read_comment
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.why.answer import AFTER_S, Moment, Verdict
from dalsegno.why.reasons import why_it_waits


def explain_job(job: JobInfo, run: str = "") -> Verdict:
    """`run`: whose job it is, where it is a run's."""
    found = _by_state(job)
    told = f"{found.sentence}{_of_run(job, run)}{_kept_off(job, run)}"
    return Verdict(told, f"dalsegno why {run}" if run and job.state is not JobState.PENDING else found.next)


def _of_run(job: JobInfo, run: str) -> str:
    if not run:
        return ""
    comment = read_comment(job.comment)
    if comment and comment.role is JobRole.JOIN:
        return f"; run {run} had asked for it in place of a node it lost"
    follows = comment is not None and comment.role is JobRole.NEXT
    return f"; it is the next job of run {run}" if follows else f"; it is the job of run {run}"


def _kept_off(job: JobInfo, run: str) -> str:
    """A job that waits although nodes are free may be one that may not have them."""
    if job.state is not JobState.PENDING or not job.excluded:
        return ""
    who = f"run {run} keeps it off {{}}: nodes it is on, or has left" if run else "nodes are excluded: {}"
    return f"; {who.format(_some(job.excluded))}"


def _by_state(job: JobInfo) -> Verdict:
    if job.state is JobState.PENDING:
        found = why_it_waits(job.reason, job.label, job.partition, job.user)
        return Verdict(f"job {job.label} waits: {found.sentence}", found.next)
    if job.state is JobState.FAILED:
        return Verdict(f"job {job.label} ended with {_code(job)}: its program failed", _look(job))
    if job.state in _ENDS:
        sentence, command = _ENDS[job.state]
        return Verdict(f"job {job.label} {sentence}", command.format(job=job.label) if command else _look(job))
    return Verdict(f"job {job.label} is {job.state.value.lower()}", f"scontrol show job {job.label}")


_ENDS = {
    JobState.RUNNING: ("runs", "squeue -j {job}"),
    JobState.COMPLETED: ("is done", ""),
    JobState.CANCELLED: ("was cancelled", "sacct -j {job} --format=JobID,State,End,ExitCode"),
    JobState.TIMEOUT: (
        "ran into its time limit; `--time` gives it more, and `dalsegno run` goes on in the next job", "",
    ),
    JobState.OUT_OF_MEMORY: ("used more memory than it had asked for; `--mem` gives it more", ""),
    JobState.NODE_FAIL: ("lost a node; `dalsegno run` would have gone on without it", "sinfo -R"),
    JobState.PREEMPTED: ("had to leave for a job of higher priority; `--requeue` queues it again", ""),
    JobState.BOOT_FAIL: ("got a node that did not boot", "sinfo -R"),
    JobState.LAUNCH_FAILED: ("could not be started on a node", "sinfo -R"),
    JobState.DEADLINE: ("could not have ended before its deadline", ""),
    JobState.REQUEUE_HOLD: ("is queued again, and held", "scontrol release {job}"),
    JobState.SUSPENDED: ("is suspended", "scontrol resume {job}"),
}  # fmt: skip


def aftermath_s(job: JobInfo) -> float:
    """For how long after its end what befell its nodes may belong to it: a job that ended well owes it to nothing."""
    return 1.0 if job.state in (JobState.COMPLETED, JobState.CANCELLED) else AFTER_S


def _code(job: JobInfo) -> str:
    if job.exit_signal:
        try:
            return signal.Signals(job.exit_signal).name
        except ValueError:
            return f"signal {job.exit_signal}"
    return f"exit code {job.exit_code}"


def _look(job: JobInfo) -> str:
    """Where to read on."""
    output = job.stderr or job.stdout
    return f"tail {shlex.quote(output)}" if output else f"sacct -j {job.label} --format=JobID,State,ExitCode,NodeList"


def moments_of_job(job: JobInfo) -> Iterator[Moment]:
    if job.submitted_at:
        yield Moment(job.submitted_at, "slurm", f"job {job.label} of {job.user} is submitted to {job.partition}")
    if job.started_at and job.state is not JobState.PENDING:
        yield Moment(job.started_at, "slurm", f"job {job.label} starts on {_nodes(job)}")
    if job.preempted_at:
        yield Moment(job.preempted_at, "slurm", f"job {job.label} has to leave for another")
    if job.ends_at and job.state.ended:
        yield Moment(job.ends_at, "slurm", f"job {job.label} ends: {job.state.value}, {_code(job)}")


def _nodes(job: JobInfo) -> str:
    return _some(job.nodes) if job.nodes else f"{job.node_count} nodes"


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:8]) + (" …" if len(nodes) > 8 else "")
