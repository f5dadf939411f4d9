"""Three researchers share four GPUs: priorities, waiting, a refusal, accounting and fair share, all by Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dalsegno.errors import CommandFailed, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState

T = TypeVar("T")


def until(answer: Callable[[], T], timeout_s: float, what: str) -> T:
    """Call `answer` until its result is not empty, and return the result; raise TargetError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not (value := answer()):
        if time.monotonic() > end:
            raise TargetError(
                f"timed out after {timeout_s:.0f} s waiting for: {what}",
                hint="the machine may be very busy; `dalsegno demo --keep` keeps the cluster for inspection",
            )
        time.sleep(POLL_S)
    return value


Notify = Callable[[str], None]
PARTITION = "lab"
BIG_PARTITION = "train"
POLL_S = 0.3  # interval between polls of the queue; not shorter, because each poll starts a process
FAIR_SHARE_WAIT_S = 150.0  # Slurm updates fair share once a minute at best


@dataclass(frozen=True)
class WantedJob:
    """A job that a researcher submits."""

    who: str
    gpus: int
    qos: str
    seconds: int


JOBS = (WantedJob("ada", 2, "medium", 7), WantedJob("bob", 2, "high", 4), WantedJob("cem", 1, "low", 2))
HEAVY, LIGHT = "ada", "cem"


@dataclass(frozen=True)
class ScenarioOutcome:
    """The outcome of the scene: the jobs from accounting, Slurm's refusal, and the priorities of the next jobs."""

    jobs: dict[str, JobInfo]
    running_at_release: tuple[str, ...]
    refusal: str
    priorities: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Lab:
    """The cluster, and a client for each researcher."""

    slurm: SlurmClient
    as_user: Callable[[str], SlurmClient]


def play(lab: Lab, notify: Notify) -> ScenarioOutcome:
    """Play the whole scene. At its end there is no job left, and the partition is up."""
    notify("the partition is closed; ada, bob and cem submit their jobs, in this order")
    lab.slurm.update(PartitionName=PARTITION, State="DOWN")
    try:
        ids = {job.who: _submit(lab, job) for job in JOBS}
        refusal = _ask_too_much(lab)
    finally:
        lab.slurm.update(PartitionName=PARTITION, State="UP")
    notify(f"dee requests 9 GPUs on an 8-GPU node: {refusal}")
    notify("the partition is open")
    running = _wait_for_start(lab, ids)
    waiting = " ".join(who for who in ids if who not in running)
    notify(f"running: {' and '.join(running)}, on all four GPUs; {waiting} waits")
    jobs = _wait_for_end(lab, ids)
    notify("all three are done; ada takes all four GPUs, and she and cem submit one more job each, otherwise identical")
    return ScenarioOutcome(jobs, running, refusal, _compare_next(lab, notify))


def _submit(lab: Lab, job: WantedJob) -> int:
    args = [
        "-A",
        job.who,
        "-p",
        PARTITION,
        f"--qos={job.qos}",
        f"--gpus={job.gpus}",
        "-J",
        job.who,
        "-o",
        "/dev/null",
    ]
    return lab.as_user(job.who).submit(args=[*args, f"--wrap=sleep {job.seconds}"])


def _ask_too_much(lab: Lab) -> str:
    try:
        lab.as_user("ada").submit(
            args=["-A", "ada", "-p", BIG_PARTITION, "--gpus-per-node=9", "-J", "dee", "--wrap=true"]
        )
    except CommandFailed as refused:
        return refused.stderr.strip().splitlines()[-1].removeprefix("sbatch: error: ")
    raise TargetError(
        "Slurm accepted a job that requests 9 GPUs on an 8-GPU node",
        hint="`dalsegno demo --keep`, then `dalsegno shell -- scontrol show nodes` shows the nodes as Slurm sees them",
    )


def _wait_for_start(lab: Lab, ids: dict[str, int]) -> tuple[str, ...]:
    """Wait until four GPUs are in use, and return the users of the running jobs, highest priority first."""

    def four_in_use() -> tuple[str, ...]:
        running = [job for job in lab.slurm.jobs() if job.id in ids.values() and job.state is JobState.RUNNING]
        ordered = sorted(running, key=lambda job: -job.priority)
        return tuple(job.name for job in ordered) if sum(job.gpus for job in running) == 4 else ()

    return until(four_in_use, 60, "four GPUs in use")


def _wait_for_end(lab: Lab, ids: dict[str, int]) -> dict[str, JobInfo]:
    def all_ended() -> dict[str, JobInfo]:
        found = {job.name: job for job in lab.slurm.history(jobs=ids.values()) if job.state.ended}
        return found if found.keys() == ids.keys() else {}

    return until(all_ended, 120, "the three jobs ended")


def _compare_next(lab: Lab, notify: Notify) -> dict[str, int]:
    """Return the priorities of two equal jobs of two users, while one of the users occupies all GPUs."""
    big_job = _submit(lab, WantedJob(HEAVY, 4, "medium", 600))
    until(lambda: lab.slurm.job(big_job).state is JobState.RUNNING, 60, f"{HEAVY}'s big job running")
    ids = {who: _submit(lab, WantedJob(who, 1, "medium", 1)) for who in (HEAVY, LIGHT)}
    notify("Slurm updates fair share once a minute: waiting for it")

    def weighed() -> dict[str, int]:
        priorities = {job.name: job.priority for job in lab.slurm.jobs() if job.id in ids.values()}
        return priorities if priorities.get(HEAVY, 0) < priorities.get(LIGHT, 0) else {}

    try:
        return until(weighed, FAIR_SHARE_WAIT_S, f"{HEAVY}'s priority below {LIGHT}'s")
    finally:
        lab.slurm.cancel(*ids.values(), big_job)


# Jobs drawn as bars over time, in text


@dataclass(frozen=True)
class JobBar:
    """A job: the text left and right of its bar, and its times in seconds from a common start."""

    label: str
    note: str
    submitted: float
    started: float
    ended: float


def draw(bars: Sequence[JobBar], width: int = 48, *, solid: str = "█", dotted: str = "·") -> str:
    """Return one line per bar, dotted while the job waits and solid while it runs, and a scale below."""
    first = min(bar.submitted for bar in bars)
    last = max(bar.ended for bar in bars)
    per_s = width / max(last - first, 1.0)
    label_width = max(len(bar.label) for bar in bars)

    def column(at: float) -> int:
        return round((at - first) * per_s)

    lines = []
    for bar in bars:
        start, end = column(bar.started), max(column(bar.ended), column(bar.started) + 1)
        track = " " * column(bar.submitted) + dotted * (start - column(bar.submitted)) + solid * (end - start)
        lines.append(f"{bar.label.ljust(label_width)}  {track.ljust(width)}  {bar.note}")
    return "\n".join([*lines, f"{' ' * label_width}  {_scale(last - first, width)}"])


def _scale(seconds: float, width: int) -> str:
    right = f"{seconds:.0f} s"
    return "0 s" + right.rjust(width - 3)
