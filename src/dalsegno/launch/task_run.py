"""A run whose processes are srun's own tasks (MPI, plain programs): asked for, started once, and its code passed on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace

from dalsegno.launch import journal
from dalsegno.launch.site import Site
from dalsegno.launch.slurm_jobs import MAIN, Job, SlurmJobs
from dalsegno.launch.status import ENDED, RUNNING, WAITING, Status, read_status, write_status
from dalsegno.launch.telling import REFRESH_S
from dalsegno.slurm.states import JobState
from dalsegno.system.children import Child, start
from dalsegno.train.contract import TERMINATED

CHECK_S = 0.5
ASK_SLURM_S = 5.0


class TaskRun:
    """The coordinator of such a run. It has no agents, so nothing in it can be restarted but all of it."""

    def __init__(self, site: Site, status: Status) -> None:
        self.site, self.folder = site, site.folder
        self.status = read_status(site.folder.status) or status
        self.jobs = SlurmJobs(site, self)
        self._srun: Child | None = None
        self._over = asyncio.Event()

    async def serve(self) -> int:
        if self.site.own_job is not None:
            self.jobs.take(MAIN, self.site.own_job)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._end, TERMINATED, "cancelled")
        else:
            self.jobs.ask(MAIN)
        self._tell(phase=WAITING, message="")
        loops = [asyncio.ensure_future(each) for each in (self._check(), self._ask_slurm())]
        await self._over.wait()
        for loop in loops:
            loop.cancel()
        await self.jobs.give_back(self.jobs.jobs)
        if self._srun is not None:
            self._srun.kill()
        self._tell(phase=ENDED, ended=time.time(), jobs=())
        return self.status.exit_code or 0

    def job_granted(self, job: Job) -> None:
        """One log for each task: srun writes them."""
        assert job.id is not None
        self._journal("granted", job=job.id, nodes=list(job.nodes))
        self._journal("generation", generation=1, nodes=list(job.nodes), nproc_per_node=self.site.shape.nproc_per_node)
        os.makedirs(self.folder.generation(1), exist_ok=True)
        argv = self.site.step(job.id, job.nodes)
        self._srun = start(argv, self.site.environment, cwd="/", output=self.folder.agents_log)
        asyncio.get_running_loop().add_reader(self._srun.fd, self._srun_ended)
        size = len(job.nodes) * self.site.shape.nproc_per_node
        self._tell(phase=RUNNING, generation=1, jobs=(job.id,), started=time.time(), world_size=size)

    def _srun_ended(self) -> None:
        assert self._srun is not None
        asyncio.get_running_loop().remove_reader(self._srun.fd)
        code = self._srun.poll()
        told = 1 if code is None else 128 - code if code < 0 else code
        self._end(told, "done" if told == 0 else f"srun ended with exit code {told}")

    def job_refused(self, job: Job, why: str) -> None:
        self._end(1, f"Slurm refused: {why}")

    def job_over(self, job: Job, state: JobState) -> None:
        if state is JobState.CANCELLED:
            self._end(TERMINATED, "cancelled")
        else:
            self._end(1, f"its job ended: {state.value}")

    def step_ended(self, job: Job) -> None: ...

    def _end(self, code: int, why: str) -> None:
        if not self._over.is_set():
            self._journal("ended", code=code, why=why)
            self.status = replace(self.status, exit_code=code, message=why)
            self._over.set()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            if self.folder.cancel.exists():
                self._end(TERMINATED, "cancelled")
            if time.time() - self.status.updated > REFRESH_S:
                self._tell()

    async def _ask_slurm(self) -> None:
        while True:
            await asyncio.sleep(ASK_SLURM_S)
            await self.jobs.check()

    def _tell(self, **changes: object) -> None:
        self.status = replace(self.status, updated=time.time(), coordinator_pid=os.getpid(), **changes)  # type: ignore[arg-type]
        write_status(self.folder.status, self.status)

    def _journal(self, event: str, **what: object) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the run
            journal.append(self.folder.journal, time.time(), event, **what)
