"""Agents from Slurm: the run's own allocation, further steps in it, one-node jobs for what it lost, the next job."""

from __future__ import annotations

import asyncio

from dalsegno.launch.events import Cancelled, Leaving, Moved
from dalsegno.launch.saved import SavedJob
from dalsegno.launch.site import Site
from dalsegno.launch.slurm_jobs import JOIN, MAIN, NEXT, Job, SlurmJobs
from dalsegno.launch.staff import Boss
from dalsegno.slurm.states import JobState
from dalsegno.train.contract import SAVED

MAX_RESTAFF = 5  # of one node, in a row, without its agent having become ready
ASK_AGAIN_S = 5.0


class SlurmStaff:
    """Keeps as many agents as the run wants, as far as Slurm gives nodes."""

    def __init__(self, site: Site, boss: Boss) -> None:
        self.site, self.boss = site, boss
        self.excluded: list[str] = []
        self.silent: set[str] = set()  # lost without a word: their hosts are taken to be dead
        self._restaffed: dict[str, int] = {}
        self._slurm = SlurmJobs(site, self)

    # Asking for nodes

    def begin(self, role: str = MAIN) -> None:
        if self.site.own_job is not None:
            self._slurm.take(role, self.site.own_job)
        else:
            self._slurm.ask(role, suspects=self.excluded)
        self.boss.keep()

    def job_granted(self, job: Job) -> None:
        self.boss.journal("granted", job=job.id, nodes=list(job.nodes), role=job.role)
        if job.role != JOIN:
            self.silent.clear()
            self.boss.apply(Moved())
        self.look_after()

    def job_refused(self, job: Job, why: str) -> None:
        self.boss.journal("refused", role=job.role, why=why)
        if job.role == MAIN:
            self.boss.stop(1, f"Slurm refused: {why}")
        elif job.role == NEXT:
            asyncio.get_running_loop().call_later(ASK_AGAIN_S, self.begin, NEXT)

    def job_over(self, job: Job, state: JobState) -> None:
        """Cancelled by its user, the run ends; preempted or out of time, it goes on in another job."""
        self.boss.journal("job over", job=job.id, role=job.role, state=state.value)
        if job.role != JOIN and state is JobState.CANCELLED and not self.boss.closing:
            self.boss.apply(Cancelled())
        elif job.role != JOIN and not any(each.role == NEXT for each in self._slurm.jobs):
            self.begin(NEXT)
        self.boss.keep()

    def step_ended(self, job: Job) -> None:
        asyncio.get_running_loop().call_later(0.05, self.look_after)

    # Keeping them

    def look_after(self) -> None:
        """Agents on every node of ours that should have one, and one-node jobs for what is missing beyond that."""
        if self.boss.closing:
            return
        present = self.boss.present
        for job in [job for job in self._slurm.jobs if job.asking is None]:
            nodes = [node for node in self._slurm.unstaffed(job, present, self.silent) if self._may_staff(node)]
            if nodes:
                self._slurm.staff(job, nodes)
                self.boss.keep()
        self._ask_for_missing(present)

    def _may_staff(self, node: str) -> bool:
        self._restaffed[node] = self._restaffed.get(node, 0) + 1
        if self._restaffed[node] > MAX_RESTAFF:
            self.boss.note(f"agents on {node} do not live: the run goes on without it")
            self.silent.add(node)
        return node not in self.silent and node not in self.excluded

    def _ask_for_missing(self, present: frozenset[str]) -> None:
        """Not before the run's own allocation is there: until then nothing is missing."""
        if not self.has_nodes or any(job.role != JOIN and not job.nodes for job in self._slurm.jobs):
            return
        there = {*present, *self._slurm.expected(present)} - set(self.excluded)
        asked = sum(not job.nodes for job in self._slurm.jobs)
        for _ in range(self.boss.wanted - len(there) - asked):
            self._slurm.ask(JOIN, suspects=self.excluded, members=sorted(there))
            self.boss.keep()

    def agent_came(self, node: str) -> None:
        self.silent.discard(node)

    def agent_ready(self, node: str) -> None:
        self._restaffed.pop(node, None)

    def agent_lost(self, node: str, silent: bool) -> None:
        self._slurm.agent_left(node)
        if silent:
            self.silent.add(node)

    async def ask_slurm(self) -> None:
        await self._slurm.check()

    # Leaving

    def leaving(self) -> None:
        asyncio.ensure_future(self._leave())  # noqa: RUF006

    async def _leave(self) -> None:
        """An agent was signalled: the time is nearly up, we are preempted, or the user has cancelled. Slurm knows."""
        await self._slurm.check()
        if self.boss.closing:
            return
        self.boss.apply(Leaving())
        if self.site.own_job is None and not any(job.role == NEXT for job in self._slurm.jobs):
            self.begin(NEXT)

    async def move(self) -> None:
        """The next job starts when none of ours is left; in a batch step we go with ours."""
        if self.site.own_job is not None:
            self.boss.stop(SAVED, "goes on in the next job")
            return
        await self._slurm.give_back([job for job in self._slurm.jobs if job.role != NEXT])
        if not self._slurm.jobs:
            self.begin(NEXT)
        self.boss.keep()

    async def dismiss(self) -> None:
        await self._slurm.give_back(self._slurm.jobs)

    # Before and after our own death

    def saved(self) -> tuple[SavedJob, ...]:
        return self._slurm.saved()

    async def adopt(self, saved: tuple[SavedJob, ...]) -> bool:
        ours = self.site.own_job is None or any(job.job == self.site.own_job for job in saved)
        if ours and saved:
            await self._slurm.adopt(saved)
        return ours and bool(saved)

    @property
    def jobs(self) -> tuple[int, ...]:
        return tuple(job.id for job in self._slurm.jobs if job.id is not None)

    @property
    def has_nodes(self) -> bool:
        return any(job.nodes for job in self._slurm.jobs)

    @property
    def waits(self) -> bool:
        return any(not job.nodes for job in self._slurm.jobs)
