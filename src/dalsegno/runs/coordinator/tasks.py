"""A run whose processes are srun's tasks (MPI, plain programs): request nodes, run srun, return its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.errors import DalsegnoError
from dalsegno.runs import journal
from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.background import BackgroundTasks
from dalsegno.runs.coordinator.generations.generations import Run
from dalsegno.runs.coordinator.nodes.slurm_jobs import SlurmJobs
from dalsegno.runs.coordinator.saved_state import SavedJob, SavedRun, find_saved, write_saved
from dalsegno.runs.coordinator.site import ASK_SLURM_S, CHECK_S, REFRESH_S, CoordinatorSite
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.status import RunCause, RunPhase, RunStatus, read_status, write_status
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.slurm.parse.srun import first_exit_code, refused_containers
from dalsegno.system.files import read_text
from dalsegno.train.contract import SAVED, TERMINATED

# States of jobs that ended for a reason outside the program. If the coordinator is on the head node, the run continues
# in another job.
_NOT_ITS_FAULT = (JobState.PREEMPTED, JobState.NODE_FAIL, JobState.BOOT_FAIL)


class TaskRun:
    """The coordinator of a task run. A task run has no agents, so it can only be restarted as a whole."""

    def __init__(self, site: CoordinatorSite, status: RunStatus) -> None:
        self.site, self.folder = site, site.folder
        self.status = read_status(site.folder.status) or status
        self.jobs = SlurmJobs(site, self)
        self._roles: dict[int, JobRole] = {}  # number of the run's only job -> its role; empty if there is no job
        self.suspended = False  # whether the coordinator ends but the run does not
        self._over = asyncio.Event()
        self._background = BackgroundTasks()

    async def serve(self) -> int:
        await self._begin()
        await self._background.until(self._over, self._check(), self._ask_slurm())
        if self.suspended:
            self.folder.exit_code.unlink(missing_ok=True)
            self._update_status(phase=RunPhase.WAITING, message="requeued", exit_code=None)
            return SAVED
        code = self.status.exit_code
        for number in self._roles:
            await self.jobs.release(number, None if code == TERMINATED else code)
        await self.jobs.sweep()
        self._update_status(phase=RunPhase.ENDED, ended=time.time(), jobs=())
        return self.status.exit_code or 0

    async def _begin(self) -> None:
        """Adopt the job and srun of a previous coordinator.

        If there are none, load the coordinator's own job or request one.
        """
        saved = await find_saved(self.site, self.jobs.sweep, lambda text: self._journal(RunEvent.NOTE, text=text))
        if self.site.own_job is not None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, lambda: self.run_in_background(self._signalled()))
        if saved is not None and any(step.process.alive() for job in saved.jobs for step in job.steps):
            self._adopt(saved.jobs)
        elif self.site.own_job is not None:
            self._roles[1] = JobRole.MAIN
            self.run_in_background(self.jobs.load(1, self.site.own_job))
        elif saved is not None and saved.jobs:
            self._adopt(saved.jobs)
        else:
            self._request(1, JobRole.MAIN)
        self._save_state()

    def _adopt(self, saved: Sequence[SavedJob]) -> None:
        self._roles = {each.number: each.role for each in saved}
        self.jobs.adopt(saved)
        self.jobs.examine(saved)

    def _request(self, number: int, role: JobRole) -> None:
        self._roles[number] = role
        self.jobs.request(number, role)

    async def _signalled(self) -> None:
        """Find out whether Slurm ended the job because of a cancellation, a requeue or the time limit."""
        await self.jobs.check()
        if self._over.is_set() or not self._roles:
            return
        if await self.jobs.is_wanted_back(min(self._roles)):
            self.suspended = True
            self._over.set()
        else:
            self._end(1, "the job reached its time limit")

    def job_granted(self, number: int, info: JobInfo) -> None:
        """Start the tasks, unless they already run or have ended. srun writes one log per task."""
        self._journal(RunEvent.GRANTED, job=info.id, nodes=list(info.nodes))
        runs = self.jobs.has_steps(number)
        if not runs and self.folder.exit_code.exists():
            self._tasks_ended(number)  # srun ended while no coordinator was running
            return
        if not runs:
            generation = self.status.generation + 1
            self._journal(RunEvent.GENERATION, generation=1, nodes=list(info.nodes), nproc_per_node=self._nproc)
            os.makedirs(self.folder.generation(1), exist_ok=True)
            self.jobs.start_agents(number, 1, info.nodes)
            self._update_status(generation=generation, restarts=generation - 1)
        began = self.status.started or time.time()
        self._update_status(
            phase=RunPhase.RUNNING, message="", jobs=(info.id,), started=began, world_size=len(info.nodes) * self._nproc
        )
        self._save_state()

    @property
    def _nproc(self) -> int:
        return self.site.shape.nproc_per_node

    def job_changed(self, number: int, info: JobInfo) -> None: ...

    def step_ended(self, number: int, step: int, missed: Mapping[str, str]) -> None:
        self._tasks_ended(number)

    def _tasks_ended(self, number: int) -> None:
        """Read srun's exit code from its file, because srun may have ended while no coordinator was running."""
        text = (read_text(self.folder.exit_code) or "").strip()
        if text == "0":
            self._end(0, "done")
        else:
            self.run_in_background(self._ask_why(number, int(text) if text.isdigit() else 1))

    async def _ask_why(self, number: int, code: int) -> None:
        """Find out whether the program failed or lost its nodes. If the job is still running, the program failed."""
        while number in self._roles and not self._over.is_set():
            if await self.jobs.runs_on(number):
                code = first_exit_code(read_text(self.folder.agents_log) or "") or code
                self._end(code, self._no_container(code) or f"the program ended with exit code {code}")
                return
            await self.jobs.check()
            await asyncio.sleep(CHECK_S)

    def _no_container(self, code: int) -> str:
        """Return why the container did not start, according to the tasks' logs; "" if they do not say so."""
        if code != NO_CONTAINER:
            return ""
        said = [read_text(path) or "" for path in sorted(self.folder.generation(1).glob("*"))]
        faults = dict.fromkeys(why for text in said for why in refused_containers(text).values())
        return f"the container could not be started: {'; '.join(faults)}" if faults else ""

    def run_in_background(self, work: Awaitable[None]) -> None:
        self._background.run_in_background(work)

    def job_refused(self, number: int, why: str) -> None:
        self._roles.pop(number, None)
        self._end(1, f"Slurm refused: {why}", RunCause.REFUSED)

    def job_over(self, number: int, job_id: int | None, state: JobState) -> None:
        self._roles.pop(number, None)
        self._journal(RunEvent.JOB_OVER, job=job_id, state=state.value)
        if state is JobState.CANCELLED:
            self._end(TERMINATED, "cancelled", RunCause.CANCELLED)
        elif state in _NOT_ITS_FAULT and self.site.own_job is None:
            self.folder.exit_code.unlink(missing_ok=True)
            self._request(number + 1, JobRole.NEXT)
            self._update_status(
                phase=RunPhase.WAITING, message=f"the run's job ended: {state.value}; waiting for another"
            )
            self._save_state()
        else:
            self._end(1, f"the run's job ended: {state.value}")

    def _end(self, code: int, why: str, about: RunCause = RunCause.OTHER) -> None:
        if not self._over.is_set():
            self._journal(RunEvent.ENDED, code=code, why=why)
            self.status = replace(self.status, exit_code=code, message=why, cause=about)
            self._over.set()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self.folder.cancel.exists():
                self._end(TERMINATED, "cancelled", RunCause.CANCELLED)
            if time.time() - self.status.updated > REFRESH_S:
                self._update_status()

    async def _ask_slurm(self) -> None:
        while True:
            await asyncio.sleep(ASK_SLURM_S)
            await self.jobs.check()

    def _save_state(self) -> None:
        with contextlib.suppress(DalsegnoError):  # a full disk must not end the run
            write_saved(self.folder.state, SavedRun(Run(self.site.shape), jobs=self.jobs.saved(self._roles)))

    def _update_status(self, **changes: object) -> None:
        changes = {"cause": RunCause.OTHER, **changes} if "message" in changes else changes
        self.status = replace(self.status, updated=time.time(), coordinator_pid=os.getpid(), **changes)  # type: ignore[arg-type]
        with contextlib.suppress(DalsegnoError):
            write_status(self.folder.status, self.status)

    def _journal(self, event: RunEvent, **what: object) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the run
            journal.append(self.folder.journal, time.time(), event, **what)
