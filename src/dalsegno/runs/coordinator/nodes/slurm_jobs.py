"""The Slurm jobs of a run: request them with salloc, start agents with srun, watch and release them.

salloc and srun run in their own sessions and outlive the coordinator. The next coordinator finds them by PID. The
caller decides what to request, start and release, and assigns numbers to jobs and steps.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from dalsegno.errors import DalsegnoError, NotThere
from dalsegno.log import rotate
from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.saved_state import SavedJob, SavedStep
from dalsegno.runs.coordinator.site import CoordinatorSite
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.names import node_list
from dalsegno.slurm.parse.srun import SallocAnswer, launch_failures, parse_salloc
from dalsegno.system.children import Child, adopt, start
from dalsegno.system.files import read_text

# Slurm calls that do not block the coordinator


TRIES = 5  # maximum number of attempts while Slurm does not respond
RETRY_S = 1.0


class PatientSlurm:
    """Asynchronous Slurm calls. Most of them are retried while Slurm does not respond."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client

    async def find_job(self, job: int) -> JobInfo | None:
        """Return the job, or None if Slurm no longer knows it. Retry until Slurm responds."""
        while True:
            try:
                return await asyncio.to_thread(self._client.job, job)
            except NotThere:
                return None
            except DalsegnoError:
                await asyncio.sleep(RETRY_S)

    async def named(self, name: str) -> list[int]:
        """Return the ids of this user's jobs with this name; empty if Slurm does not respond."""
        try:
            found = await asyncio.to_thread(self._client.jobs)
        except DalsegnoError:
            return []
        return [job.id for job in found if job.name == name and job.uid == os.geteuid()]

    async def slurmd_port(self) -> int:
        """Return the default port of the cluster's slurmd; 0 if Slurm does not respond."""
        try:
            port = (await asyncio.to_thread(self._client.config)).get("SlurmdPort", "")
        except DalsegnoError:
            return 0
        return int(port) if port.isdigit() else 0

    async def cancel(self, job: int) -> None:
        for _ in range(TRIES):
            try:
                return await asyncio.to_thread(self._client.cancel, job)
            except DalsegnoError:
                await asyncio.sleep(RETRY_S)
        return None

    async def complete(self, job: int, exit_code: int) -> bool:
        """End the job with this exit code.

        Return False on failure, for example if this version of libslurm is not supported.
        """
        try:
            await asyncio.to_thread(self._client.complete, job, exit_code)
        except DalsegnoError:
            return False
        return True

    async def shrink(self, job: int, nodes: Sequence[str]) -> bool:
        """Reduce a job to these nodes and return whether that succeeded. If not, the caller tries again later."""
        try:
            await asyncio.to_thread(self._client.update, JobId=str(job), NodeList=node_list(nodes))
        except DalsegnoError:
            return False
        return True

    async def comment(self, job: int, text: str) -> bool:
        """Set a job's comment, without retries, and return whether that succeeded."""
        try:
            await asyncio.to_thread(self._client.update, JobId=str(job), Comment=text)
        except DalsegnoError:
            return False
        return True

    async def requeue(self, job: int) -> bool:
        """Requeue a batch job, unless Slurm is already doing so; return False if that failed."""
        for _ in range(TRIES):
            try:
                info = await asyncio.to_thread(self._client.job, job)
                if info.state is not JobState.COMPLETING or info.ends_at is not None:
                    await asyncio.to_thread(self._client.requeue, job)
                return True
            except DalsegnoError:
                await asyncio.sleep(RETRY_S)
        return False


# Processes of jobs and steps


def job_state(info: JobInfo) -> JobState:
    """Return the state of a job. A job that is COMPLETING because its user ended it counts as CANCELLED.

    Slurm reports CANCELLED only after COMPLETING. A job that was preempted or has reached its time limit is also
    COMPLETING, but still has some seconds to save. A job that is requeued has no end time.
    """
    if info.state is not JobState.COMPLETING or info.preempted_at or info.ends_at is None or info.started_at is None:
        return info.state
    out_of_time = info.time_limit_s is not None and info.ends_at - info.started_at >= info.time_limit_s
    return info.state if out_of_time else JobState.CANCELLED


_MAX_OUTPUT_BYTES = 1 << 20  # limit on the output read from a step; agents may have written much more


@dataclass(eq=False)
class StepProcess:
    """A running srun."""

    child: Child
    nodes: tuple[str, ...]
    output_from: int = 0  # offset of this step's output in the agents' log


@dataclass(eq=False)
class JobProcesses:
    """The salloc and srun processes of one job. `id` is None until salloc prints it."""

    number: int
    id: int | None = None
    asking: Child | None = None  # the salloc process that waits for the job
    steps: dict[int, StepProcess] = field(default_factory=dict)
    granted: bool = False
    given_back: bool = False


class JobListener(Protocol):
    """The receiver of events about jobs."""

    def job_granted(self, number: int, info: JobInfo) -> None: ...

    def job_changed(self, number: int, info: JobInfo) -> None: ...

    def job_refused(self, number: int, why: str) -> None: ...

    def job_over(self, number: int, job_id: int | None, state: JobState) -> None: ...

    def step_ended(self, number: int, step: int, missed: Mapping[str, str]) -> None:
        """Handle the end of an srun. `missed` contains the nodes on which it could not start anything, and why."""
        ...

    def run_in_background(self, work: Awaitable[None]) -> None:
        """Start background work."""
        ...


class SlurmJobs:
    """The processes of all jobs that a run has or requests."""

    def __init__(self, site: CoordinatorSite, listener: JobListener) -> None:
        self.site, self.listener = site, listener
        self.slurm = PatientSlurm(site.slurm)
        self._jobs: dict[int, JobProcesses] = {}

    # Requesting jobs

    def request(self, number: int, role: JobRole, suspects: Sequence[str] = (), members: Sequence[str] = ()) -> None:
        argv = self.site.allocation(role, suspects, members)
        job = self._jobs[number] = JobProcesses(number)
        job.asking = start(argv, self.site.environment, output=self._log(job))
        self._watch(job.asking, partial(self._salloc_ended, job))

    def load(self, number: int, job_id: int) -> Awaitable[None]:
        """Add a job that exists already. The returned awaitable reports the job's nodes to the listener."""
        job = self._jobs[number] = JobProcesses(number, job_id)
        return self._load_nodes(job, job_id)

    def _salloc_ended(self, job: JobProcesses) -> None:
        """Handle the end of salloc: Slurm granted the job or refused it."""
        answer = self._answer(job)
        job.asking, code = None, job.asking.poll() if job.asking else None
        job.id = answer.job or job.id
        if job.given_back:
            self.listener.run_in_background(self._cancel(job))
        elif code in (0, None) and answer.granted and job.id is not None:
            self.listener.run_in_background(self._load_nodes(job, job.id))
        else:
            del self._jobs[job.number]
            self.listener.job_refused(job.number, answer.last_words or f"salloc ended with {code}")

    async def _load_nodes(self, job: JobProcesses, job_id: int) -> None:
        info = await self.slurm.find_job(job_id)
        if job.given_back:
            return
        if info is None or info.state.ended:
            self._over(job, info.state if info else JobState.UNKNOWN)
        else:
            job.granted = True
            self.listener.job_granted(job.number, info)

    def _answer(self, job: JobProcesses) -> SallocAnswer:
        return parse_salloc(read_text(self._log(job)) or "")

    def _log(self, job: JobProcesses) -> Path:
        return self.site.folder.salloc_log(job.number)

    # Starting agents

    def start_agents(self, number: int, step: int, nodes: Sequence[str]) -> None:
        """Start agents on these nodes of a job."""
        job = self._jobs.get(number)
        if job is None or job.id is None:
            return
        argv = self.site.step(job.id, nodes)
        folder = self.site.folder
        stdin = folder.connect if folder.connect.exists() else None
        output_from = _size(folder.agents_log)
        child = start(argv, self.site.environment, stdin=stdin, output=folder.agents_log)
        job.steps[step] = StepProcess(child, tuple(nodes), output_from)
        self._watch(child, partial(self._step_ended, job, step))

    def _step_ended(self, job: JobProcesses, number: int) -> None:
        step = job.steps.pop(number)
        step_output = read_since(self.site.folder.agents_log, step.output_from)
        self.listener.step_ended(job.number, number, launch_failures(step_output, job.id or 0, step.nodes))

    def step_output(self, nodes: Collection[str]) -> dict[int, str]:
        """Return the output of the steps that start agents on these nodes, by step number."""
        steps = [item for job in self._jobs.values() for item in job.steps.items()]
        log = self.site.folder.agents_log
        return {number: read_since(log, step.output_from) for number, step in steps if {*step.nodes} & {*nodes}}

    def _rotate_log(self) -> None:
        """Rotate the agents' log if it is too long.

        Afterwards, the output of running steps is read from the start of the new log.
        """
        if rotate(str(self.site.folder.agents_log)):
            for job in self._jobs.values():
                for step in job.steps.values():
                    step.output_from = 0

    def has_steps(self, number: int) -> bool:
        return number in self._jobs and bool(self._jobs[number].steps)

    # Checking the granted jobs

    async def check(self) -> None:
        """Ask Slurm for the state of the granted jobs and report it to the listener."""
        self._rotate_log()
        for job in [job for job in self._jobs.values() if job.granted]:
            info = await self._find(job)
            if job.given_back or job.number not in self._jobs:
                continue
            state = job_state(info) if info else JobState.UNKNOWN
            if info is None or state.ended:
                self._over(job, state)
            elif info.nodes:
                self.listener.job_changed(job.number, info)

    async def runs_on(self, number: int) -> bool:
        """Return whether the job runs and is not being preempted."""
        info = await self._find(self._jobs[number])
        return info is not None and info.state is JobState.RUNNING and not info.preempted_at

    async def is_wanted_back(self, number: int) -> bool:
        """Return whether the job was preempted or requeued, in which case the run continues later."""
        info = await self._find(self._jobs[number])
        return info is not None and bool(info.preempted_at or info.ends_at is None)

    async def _find(self, job: JobProcesses) -> JobInfo | None:
        assert job.id is not None
        return await self.slurm.find_job(job.id)

    def _over(self, job: JobProcesses, state: JobState) -> None:
        if self._jobs.pop(job.number, None) is not None:
            for step in job.steps.values():
                step.child.kill()
            self.listener.job_over(job.number, job.id, state)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of all jobs that have one."""
        return tuple(job.id for job in self._jobs.values() if job.id is not None)

    # Releasing jobs

    async def release(self, number: int, code: int | None = None) -> None:
        """End a job that is no longer needed. Without `code`, it is cancelled."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        job.given_back = True
        if job.asking is not None:
            job.asking.kill()
            job.id = job.id or self._answer(job).job
        await self._cancel(job, code)

    async def sweep(self) -> None:
        """Cancel the remaining jobs of the run by name. This includes jobs whose id is unknown."""
        for each in await self.slurm.named(self.site.folder.run):
            if each != self.site.own_job:
                await self.slurm.cancel(each)

    async def _cancel(self, job: JobProcesses, code: int | None = None) -> None:
        """End a job and its steps. If it is the coordinator's own job, end only the steps."""
        if job.id is not None and job.id != self.site.own_job:
            complete = code is not None and job.granted
            if not (complete and await self.slurm.complete(job.id, code or 0)):
                await self.slurm.cancel(job.id)
        until = time.monotonic() + 2.0
        while any(step.child.alive() for step in job.steps.values()) and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for step in job.steps.values():
            step.child.kill()  # srun may wait forever for a lost node

    # State for the next coordinator

    def saved(self, roles: Mapping[int, JobRole]) -> tuple[SavedJob, ...]:
        """Return the jobs whose numbers are in `roles`, with their processes."""
        return tuple(
            SavedJob(
                roles[job.number],
                job.id,
                job.number,
                job.asking.process if job.asking else None,
                tuple(SavedStep(step.child.process, step.nodes) for step in job.steps.values()),
            )
            for job in self._jobs.values()
            if job.number in roles
        )

    def adopt(self, saved: Iterable[SavedJob]) -> dict[int, dict[int, tuple[str, ...]]]:
        """Adopt the previous coordinator's jobs. Return the nodes of their running steps, by job and step number.

        Call `examine` next. That is a separate call, because `examine` may save the state, which needs all jobs.
        """
        last = 0
        for each in saved:
            job = self._jobs[each.number] = JobProcesses(each.number, each.job)
            job.asking = adopt(each.asking) if each.asking else None
            for step in each.steps:
                if (child := adopt(step.process)) is not None:
                    last += 1
                    job.steps[last] = StepProcess(child, step.nodes, _size(self.site.folder.agents_log))
                    self._watch(child, partial(self._step_ended, job, last))
        return {
            number: {step: process.nodes for step, process in job.steps.items()} for number, job in self._jobs.items()
        }

    def examine(self, saved: Iterable[SavedJob]) -> None:
        """Query the state of the adopted jobs and report it to the listener."""
        for each in saved:
            job = self._jobs[each.number]
            if job.asking is not None:
                self._watch(job.asking, partial(self._salloc_ended, job))
            elif each.asking is None and each.job is not None:
                self.listener.run_in_background(self._load_nodes(job, each.job))
            else:
                self._salloc_ended(job)

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


def read_since(path: Path, offset: int) -> str:
    """Return the text of a log after this offset, up to a limit; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_MAX_OUTPUT_BYTES).decode(errors="replace")
    except OSError:
        return ""
