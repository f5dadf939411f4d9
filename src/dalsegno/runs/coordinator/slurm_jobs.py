"""The Slurm jobs of a run: requested with salloc, given agents with srun, watched, released.

salloc and srun run in sessions of their own and outlive the coordinator. Its successor finds them by their PIDs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.saved_state import SavedJob, SavedStep
from dalsegno.runs.coordinator.site import CoordinatorSite
from dalsegno.runs.coordinator.slurm_calls import PatientSlurm
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.salloc import SallocAnswer, read_answer
from dalsegno.slurm.parse.srun import ended_on, launch_failures, refused_containers, started_outside, why_not_started
from dalsegno.system.children import Child, adopt, start
from dalsegno.system.files import read_text

# Jobs and steps


ARRIVAL_S = 20.0  # a node without an agent so long after the start of its srun, or the last check, is checked
LONGEST_S = 1800.0  # importing a large image or a long prolog may precede the start of an agent


@dataclass(eq=False)
class AgentStep:
    """One srun. `left` are nodes whose agent came and went; this step will not start another."""

    child: Child
    nodes: tuple[str, ...]
    began: float
    said_from: int = 0  # where its own output begins in the agents' log
    left: set[str] = field(default_factory=set)
    looked: dict[str, float] = field(default_factory=dict)  # when a node with a slow agent was last found healthy
    adopted: bool = False  # started by a previous coordinator, some time ago

    def will_bring(self, node: str, now: float) -> bool:
        return self._may_bring(node) and now - self.looked.get(node, self.began) < ARRIVAL_S

    def is_slow(self, node: str, now: float) -> bool:
        """Return whether the agent may still come and is merely slow."""
        return self._may_bring(node) and not self.adopted and now - self.began < LONGEST_S

    def _may_bring(self, node: str) -> bool:
        return node in self.nodes and node not in self.left and self.child.alive()


@dataclass(eq=False)
class Job:
    """One job of the run. It has no id until Slurm's answer is read."""

    role: JobRole
    number: int
    id: int | None = None
    nodes: tuple[str, ...] = ()
    asking: Child | None = None
    steps: list[AgentStep] = field(default_factory=list)
    given_back: bool = False
    adopted: bool = False  # granted to a previous coordinator
    ends_at: int | None = None
    left: frozenset[str] = frozenset()  # nodes of the job that Slurm was told are no longer needed


def job_state(info: JobInfo) -> JobState:
    """Return the state of a job; CANCELLED for one that is completing because its user ended it.

    Slurm itself reports that only once the job is gone. A job that was preempted or has reached its time limit still
    has seconds in which to save. A job that is requeued has no end time.
    """
    if info.state is not JobState.COMPLETING or info.preempted_at or info.ends_at is None or info.started_at is None:
        return info.state
    out_of_time = info.time_limit_s is not None and info.ends_at - info.started_at >= info.time_limit_s
    return info.state if out_of_time else JobState.CANCELLED


_MOST_BYTES = 1 << 20  # of a step's output; agents may have written much more


class JobListener(Protocol):
    """Receives the events of jobs."""

    def job_granted(self, job: Job) -> None: ...

    def job_refused(self, job: Job, why: str) -> None: ...

    def job_over(self, job: Job, state: JobState) -> None: ...

    def step_ended(self, job: Job, step: AgentStep) -> None: ...

    def run_in_background(self, work: Awaitable[None]) -> None:
        """Start background work."""
        ...


class SlurmJobs:
    """All jobs that a run has or requests."""

    def __init__(self, site: CoordinatorSite, listener: JobListener) -> None:
        self.site, self.listener = site, listener
        self.slurm = PatientSlurm(site.slurm)
        self.jobs: list[Job] = []
        self.count = 0

    # Requests

    def request(self, role: JobRole, suspects: Sequence[str] = (), members: Sequence[str] = ()) -> Job:
        self.count += 1
        job = Job(role, self.count)
        argv = self.site.allocation(role, suspects, members)
        job.asking = start(argv, self.site.environment, output=self._log(job))
        self.jobs.append(job)
        self._watch(job.asking, partial(self._salloc_ended, job))
        return job

    def add_own(self, role: JobRole, job_id: int) -> Job:
        """Add a job that exists already: the one whose batch step runs the coordinator."""
        self.count += 1
        job = Job(role, self.count, job_id)
        self.jobs.append(job)
        self.listener.run_in_background(self._load_nodes(job))
        return job

    def _salloc_ended(self, job: Job) -> None:
        """Handle the end of salloc: granted or refused."""
        answer = self._answer(job)
        job.asking, code = None, job.asking.poll() if job.asking else None
        job.id = answer.job or job.id
        if job.given_back:
            self.listener.run_in_background(self._cancel(job))
        elif code in (0, None) and answer.granted:
            self.listener.run_in_background(self._load_nodes(job))
        else:
            self.jobs.remove(job)
            self.listener.job_refused(job, answer.last_words or f"salloc ended with {code}")

    async def _load_nodes(self, job: Job) -> None:
        info = await self._look(job)
        if info is None or info.state.ended:
            return self._over(job, info.state if info else JobState.UNKNOWN)
        job.nodes, job.ends_at = info.nodes, info.ends_at
        return self.listener.job_granted(job)

    def waiting_id(self, job: Job) -> int | None:
        """Return the id of a job that salloc waits for."""
        job.id = job.id or self._answer(job).job
        return job.id

    def _answer(self, job: Job) -> SallocAnswer:
        return read_answer(read_text(self._log(job)) or "")

    def _log(self, job: Job) -> Path:
        return self.site.folder.salloc_log(job.number)

    # Agents

    def start_agents(self, job: Job, nodes: Sequence[str]) -> None:
        """Start agents on these nodes of a job."""
        if job.id is None or not nodes:
            return
        argv = self.site.step(job.id, nodes)
        folder = self.site.folder
        stdin = folder.connect if folder.connect.exists() else None
        said_from = _size(folder.agents_log)
        child = start(argv, self.site.environment, stdin=stdin, output=folder.agents_log)
        step = AgentStep(child, tuple(nodes), time.monotonic(), said_from)
        job.steps.append(step)
        self._watch(child, partial(self._step_ended, job, step))

    def _step_ended(self, job: Job, step: AgentStep) -> None:
        step.child.poll()
        if step in job.steps:
            job.steps.remove(step)
        self.listener.step_ended(job, step)

    def not_reached(self, job: Job, step: AgentStep) -> dict[str, str]:
        """Return why srun could not start anything, by node."""
        return launch_failures(self._said(step), job.id or 0, step.nodes)

    def startup_failure(self, node: str) -> str:
        """Return why agents on this node end as soon as they start; "" if unknown."""
        said = _said_since(self.site.folder.agents_log, 0)
        if started_outside(said, node):
            return ": the container does not start there (run `dalsegno containers check` for the reason)"
        why = why_not_started(said, node)
        return f" ({why})" if why else ""

    def container_faults(self) -> list[str]:
        """Return why the container failed on every node; empty if some node has not refused it."""
        refused = refused_containers(_said_since(self.site.folder.agents_log, 0))
        nodes = [node for job in self.jobs for node in job.nodes]
        return list(dict.fromkeys(refused[node] for node in nodes)) if nodes and set(nodes) <= set(refused) else []

    def agent_left(self, node: str) -> None:
        for job in self.jobs:
            for step in job.steps:
                if node in step.nodes:
                    step.left.add(node)

    def unstaffed(self, job: Job, present: Collection[str], silent: Collection[str]) -> list[str]:
        """Return the nodes of a job that have no agent, will not get one, and are not known to be dead."""
        now = time.monotonic()
        return [node for node in job.nodes if node not in present and node not in silent and not self._due(node, now)]

    def slow_agents(self, nodes: Collection[str]) -> dict[str, float]:
        """Return how many seconds agents have been due, by node, for those that may still come.

        If srun has reported the end of a task, its agent no longer comes.
        """
        now = time.monotonic()
        found: dict[str, float] = {}
        for step in [step for job in self.jobs for step in job.steps]:
            late = {node for node in nodes if step.is_slow(node, now)}
            for node in late - ended_on(self._said(step)) if late else ():
                found[node] = max(now - step.began, found.get(node, 0.0))
        return found

    def extend_wait(self, nodes: Collection[str]) -> None:
        """Give the agents of these nodes more time: the nodes were checked and are healthy."""
        now = time.monotonic()
        for step in [step for job in self.jobs for step in job.steps]:
            step.looked.update(dict.fromkeys({*nodes} & {*step.nodes}, now))

    def _said(self, step: AgentStep) -> str:
        return _said_since(self.site.folder.agents_log, step.said_from)

    def expected(self, present: Collection[str]) -> set[str]:
        """Return the nodes whose agents are on their way."""
        now = time.monotonic()
        return {node for job in self.jobs for node in job.nodes if node not in present and self._due(node, now)}

    def _due(self, node: str, now: float) -> bool:
        return any(step.will_bring(node, now) for job in self.jobs for step in job.steps)

    # Watching

    async def check(self) -> None:
        """Ask Slurm for the state of the jobs and report those that are over."""
        for job in [job for job in self.jobs if job.id is not None and job.asking is None and job.nodes]:
            info = await self._look(job)
            if job not in self.jobs:
                continue
            state = job_state(info) if info else JobState.UNKNOWN
            if info is None or state.ended:
                self._over(job, state)
            elif info.nodes:
                job.nodes, job.ends_at = info.nodes, info.ends_at

    async def runs_on(self, job: Job) -> bool:
        """Return whether the job runs and is not being preempted."""
        info = await self._look(job)
        return info is not None and info.state is JobState.RUNNING and not info.preempted_at

    async def is_wanted_back(self, job: Job) -> bool:
        """Return whether Slurm takes the nodes only for a while: the job was preempted, or is requeued."""
        info = await self._look(job)
        return info is not None and bool(info.preempted_at or info.ends_at is None)

    async def _look(self, job: Job) -> JobInfo | None:
        assert job.id is not None
        return await self.slurm.look(job.id)

    def _over(self, job: Job, state: JobState) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
            for step in job.steps:
                step.child.kill()
            if not job.given_back:
                self.listener.job_over(job, state)

    # Release

    async def release_nodes(self, job: Job, nodes: Collection[str]) -> None:
        """Release some of a job's nodes. Those of a running step stay, since the release would kill the step."""
        busy = {node for step in job.steps for node in step.nodes}
        stay = tuple(node for node in job.nodes if node in busy or node not in nodes)
        if job.id is not None and stay != job.nodes and await self.slurm.shrink(job.id, stay):
            job.nodes = stay

    async def release(self, jobs: Iterable[Job], code: int | None = None) -> None:
        """End jobs that are no longer needed, except the coordinator's own. Without a code they are cancelled."""
        for job in list(jobs):
            job.given_back = True
            if job.asking is not None:
                job.asking.kill()
                self.waiting_id(job)
            await self._cancel(job, code)

    async def sweep(self) -> None:
        """Cancel the run's remaining jobs by name, including those whose id was never learned."""
        for each in await self.slurm.named(self.site.folder.run):
            if each != self.site.own_job:
                await self.slurm.cancel(each)

    async def _cancel(self, job: Job, code: int | None = None) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
        if job.id is not None and job.id != self.site.own_job:
            had_nodes = code is not None and bool(job.nodes)
            if not (had_nodes and await self.slurm.complete(job.id, code or 0)):
                await self.slurm.cancel(job.id)
        until = time.monotonic() + 2.0
        while any(step.child.alive() for step in job.steps) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for step in job.steps:
            step.child.kill()  # srun may wait forever for a lost node

    # State for a successor

    def saved(self) -> tuple[SavedJob, ...]:
        return tuple(
            SavedJob(
                job.role,
                job.id,
                job.number,
                job.asking.process if job.asking else None,
                tuple(SavedStep(step.child.process, step.nodes) for step in job.steps),
            )
            for job in self.jobs
        )

    async def adopt(self, saved: Sequence[SavedJob]) -> None:
        """Adopt the previous coordinator's jobs. All are added before any is examined: the state may be saved
        meanwhile."""
        self.count = max((each.number for each in saved), default=0)
        jobs = [self._adopt_job(each) for each in saved]
        for job in jobs:
            if job.asking is not None:
                self._watch(job.asking, partial(self._salloc_ended, job))
            elif job.adopted:
                self.listener.run_in_background(self._load_nodes(job))
            else:
                self._salloc_ended(job)

    def _adopt_job(self, saved: SavedJob) -> Job:
        job = Job(saved.role, saved.number, saved.job, adopted=saved.asking is None)
        job.asking = adopt(saved.asking) if saved.asking else None
        self.jobs.append(job)
        for each in saved.steps:
            child = adopt(each.process)
            if child is not None:
                step = AgentStep(child, each.nodes, time.monotonic(), _size(self.site.folder.agents_log), adopted=True)
                job.steps.append(step)
                self._watch(child, partial(self._step_ended, job, step))
        return job

    def _watch(self, child: Child, ended: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def once() -> None:
            loop.remove_reader(child.fd)
            child.poll()
            child.close()
            ended()

        loop.add_reader(child.fd, once)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _said_since(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""
