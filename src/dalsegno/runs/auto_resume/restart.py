"""Ask Slurm about the job and the nodes of a step, and restart the step if a node has failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.runs.auto_resume.decide import (
    MAX_RESTARTS,
    SETTLE_S,
    Choice,
    LeaveStep,
    RequeueJob,
    StartAgain,
    StepFacts,
    choose,
    failures,
    unsettled,
)
from dalsegno.runs.auto_resume.srun_step import SrunStep, read_notes, report
from dalsegno.runs.coordinator.agents.liveness import unreachable
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo
from dalsegno.system.process_wrapper import ProcessWrapper
from dalsegno.system.processes import LocalRunner

_REQUEUE_S = 60.0  # how long to wait until Slurm ends the script of a requeued job


def decide_restart(
    here: ProcessWrapper, srun: str, step: SrunStep, times: int, restarts: int, hung_up: bool
) -> StartAgain | None:
    """Return how to restart the step; None if it must not be restarted."""
    slurm = _slurm(srun)
    choice, failed = StepWatch(slurm, here.pause, restarts, hung_up).until_known(step, times)
    nodes = "; ".join(f"{name} has failed ({why})" for name, why in failed.items()) or f"job {step.job} has lost a node"
    if isinstance(choice, StartAgain):
        where = "a new job" if choice.alone else f"job {step.job}"
        report(f"{nodes}: restarting the step in {where} (restart {times + 1} of at most {MAX_RESTARTS})")
        return choice
    if isinstance(choice, RequeueJob):
        _requeue(here, slurm, step.job, f"{nodes}: {choice.why}")
    else:
        _leave_step(here, choice, nodes)
    return None


def _leave_step(here: ProcessWrapper, choice: LeaveStep, nodes: str) -> None:
    if choice.why:
        report(f"{nodes}: {choice.why}")
    if choice.ends:
        here.pause(_REQUEUE_S)


def _requeue(here: ProcessWrapper, slurm: SlurmClient, job: int, why: str) -> None:
    try:
        report(f"{why}; requeueing it, so that its script restarts on healthy nodes")
        slurm.requeue(job)
    except DalsegnoError as error:
        report(f"could not requeue job {job}, so the step ends here: {error}")
        return
    here.pause(_REQUEUE_S)


def _slurm(srun: str) -> SlurmClient:
    return SlurmClient(LocalRunner(), os.environ, bin_dir=os.path.dirname(srun), timeout_s=10)


def is_over(srun: str, notes: str) -> bool:
    """Return whether Slurm has ended the job or the step after the loss of a node.

    srun itself may wait forever for tasks on a lost node.
    """
    step, slurm = read_notes(notes), _slurm(srun)
    job = slurm.job(step.job) if step else None
    if step is None or job is None or job.state is not JobState.RUNNING:
        return job is not None and job.state is JobState.NODE_FAIL
    return bool(set(step.nodes) - set(job.nodes)) and not slurm.has_step(step.job, step.id)


# Observing the job and the nodes of an ended step


POLL_S = 1.0
SLURM_TIMEOUT_S = 2 * SETTLE_S


def wait_for_choice(
    observe: Callable[[float], StepFacts], pause: Callable[[float], bool], clock: Callable[[], float]
) -> Choice:
    """Call `observe` with the elapsed seconds until a decision is possible; return the decision.

    If `pause` returns true, because a signal asked this program to end, the step is not restarted.
    """
    began = clock()
    while True:
        for_s = clock() - began
        with contextlib.suppress(DalsegnoError):  # slurmctld may not respond for a moment
            if (choice := choose(observe(for_s))) is not None:
                return choice
        if for_s >= SLURM_TIMEOUT_S:
            return LeaveStep("Slurm does not respond, so the step ends here")
        if pause(POLL_S):
            return LeaveStep()


class StepWatch:
    """Observes the job and the nodes of an ended step until it is decided whether to restart the step."""

    def __init__(self, slurm: SlurmClient, pause: Callable[[float], bool], restarts: int, hung_up: bool) -> None:
        self._slurm = slurm
        self._pause = pause
        self._restarts = restarts
        self._hung_up = hung_up

    def until_known(self, step: SrunStep, times: int) -> tuple[Choice, dict[str, str]]:
        """Return the decision, and the step's nodes that have failed."""
        failed = dict[str, str]()
        choice = wait_for_choice(lambda for_s: self._observe(step, failed, for_s, times), self._pause, time.monotonic)
        return choice, failed

    def _observe(self, step: SrunStep, failed: dict[str, str], for_s: float, times: int) -> StepFacts:
        job = self._job(step.job)
        running = job.nodes if job and job.state is JobState.RUNNING else ()
        nodes = self._slurm.nodes(sorted({*step.nodes, *running}))
        bad = failures(nodes, self._silent(nodes))
        taken = [name for name in step.nodes if running and name not in running]
        for name in step.nodes:
            if name in bad or name in taken:
                failed.setdefault(name, bad.get(name, "Slurm has taken it from the job"))
        waiting = tuple(unsettled([node for node in nodes if node.name not in taken], bad))
        return StepFacts(step.nodes, job, dict(failed), bad, waiting, for_s, times, self._restarts, self._hung_up)

    def _job(self, id: int) -> JobInfo | None:
        try:
            return self._slurm.job(id)
        except NotThere:
            return None

    def _silent(self, nodes: list[NodeInfo]) -> list[str]:
        async def usual_port() -> int:
            return int(self._slurm.config().get("SlurmdPort", "0") or 0)

        return asyncio.run(unreachable(nodes, usual_port))
