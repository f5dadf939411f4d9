"""Agents from Slurm: the run's own allocation, further steps in it, one-node jobs for what it lost, the next job."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Sequence

from dalsegno.errors import DalsegnoError
from dalsegno.launch.events import Cancelled, Leaving, Moved
from dalsegno.launch.saved import SavedJob, SavedStep
from dalsegno.launch.site import Site
from dalsegno.launch.slurm_job import JOIN, MAIN, NEXT, Job
from dalsegno.launch.slurm_jobs import SlurmJobs
from dalsegno.launch.staff import Boss
from dalsegno.slurm.node_info import NodeInfo
from dalsegno.slurm.states import JobState
from dalsegno.system.procfs import start_ticks

MAX_RESTAFF = 5  # of one node, in a row, without its agent having become ready
ASK_AGAIN_S, MAX_ASK_AGAIN_S = 5.0, 60.0
LAST_MOMENT_S = 10.0  # before the end of its job, a run that has not left by then is taken off it


class SlurmStaff:
    """Keeps as many agents as the run wants, as far as Slurm gives nodes."""

    def __init__(self, site: Site, boss: Boss) -> None:
        self.site, self.boss = site, boss
        self.excluded: list[str] = []
        self.silent: dict[str, float] = {}  # lost without a word, and when: their hosts are taken to be dead
        self.unhealthy: frozenset[str] = frozenset()
        self._restaffed: dict[str, int] = {}
        self._ask_again_at = 0.0
        self._refused = 0  # joins in a row
        self._jobs = SlurmJobs(site, self)

    # Asking for nodes

    def begin(self, role: str = MAIN) -> None:
        if self.site.own_job is not None:
            self._jobs.take(role, self.site.own_job)
        else:
            self._jobs.ask(role, suspects=self.excluded)
        self.boss.keep()

    def job_granted(self, job: Job) -> None:
        self._refused = 0
        self.boss.journal("granted", job=job.id, nodes=list(job.nodes), role=job.role)
        if job.role == NEXT or (job.role == MAIN and not job.adopted):
            job.role = MAIN
            self.boss.apply(Moved())
        elif job.role == JOIN and not job.adopted and self._has_agent(job):
            self.soon(self._jobs.give_back([job]))  # where nodes are shared, Slurm may give one that we have
        self.look_after()

    def _has_agent(self, job: Job) -> bool:
        there = {
            *self.boss.present,
            *self.silent,
            *(node for each in self._jobs.jobs if each is not job for node in each.nodes),
        }
        return any(node in there for node in job.nodes)

    def job_refused(self, job: Job, why: str) -> None:
        self.boss.journal("refused", role=job.role, why=why)
        if job.role == MAIN:
            self.boss.stop(1, f"Slurm refused: {why}")
        elif job.role == NEXT:
            self.boss.note(f"Slurm refused: {why}; asked again in {ASK_AGAIN_S:.0f} s")
            asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._begin_again)
        else:
            self._refused += 1
            self._ask_again_at = time.monotonic() + min(ASK_AGAIN_S * 2 ** (self._refused - 1), MAX_ASK_AGAIN_S)

    def _begin_again(self) -> None:
        if not self.boss.ending:
            self.begin(NEXT)

    def job_over(self, job: Job, state: JobState) -> None:
        """Cancelled by its user, the run ends; preempted or out of time, it goes on in another job."""
        self.boss.journal("job over", job=job.id, role=job.role, state=state.value)
        if job.role != JOIN and state is JobState.CANCELLED:
            self.boss.apply(Cancelled())
        elif self.site.own_job is not None or self.boss.ending:
            pass  # with our own job we go too
        elif job.role != JOIN and not self._promote() and not any(each.role == NEXT for each in self._jobs.jobs):
            self.begin(NEXT)
        self.boss.keep()

    def _promote(self) -> bool:
        """Has the run lost all nodes of its own job, the oldest of those that joined is its job from now on."""
        joined = [each for each in self._jobs.jobs if each.role == JOIN and each.nodes]
        if self.boss.closing or not joined:
            return False
        joined[0].role = MAIN
        return True

    def step_ended(self, job: Job) -> None:
        asyncio.get_running_loop().call_later(0.05, self.look_after)

    # Keeping them

    def look_after(self) -> None:
        """Agents on every node of ours that should have one, and one-node jobs for what is missing beyond that."""
        if self.boss.closing:
            return
        present = self.boss.present
        for job in [job for job in self._jobs.jobs if job.asking is None]:
            nodes = [node for node in self._jobs.unstaffed(job, present, self.silent) if self._may_staff(node)]
            if nodes:
                self._jobs.staff(job, nodes)
                self.boss.keep()
        self._ask_for_missing(present)

    def _may_staff(self, node: str) -> bool:
        if node in self.excluded:
            return False
        self._restaffed[node] = self._restaffed.get(node, 0) + 1
        if self._restaffed[node] > MAX_RESTAFF:
            self.boss.note(f"agents on {node} do not live: the run goes on without it")
            self.silent[node] = time.time()
        return node not in self.silent

    def _ask_for_missing(self, present: frozenset[str]) -> None:
        """Not before the run's own allocation is there: until then nothing is missing."""
        if not self.has_nodes or any(job.role != JOIN and not job.nodes for job in self._jobs.jobs):
            return
        there = {*present, *self._jobs.expected(present)} - set(self.excluded)
        may_ask = not self.waits and time.monotonic() >= self._ask_again_at
        wanted = self.boss.wanted + self.site.spares  # a spare that has taken a rank is one no more
        if len(there) < wanted and may_ask:  # one after the other, so that no two get the same node
            self._jobs.ask(JOIN, suspects=[*self.excluded, *self.silent], members=sorted(there))
            self.boss.keep()

    def agent_came(self, node: str) -> None:
        self.silent.pop(node, None)

    def agent_ready(self, node: str) -> None:
        self._restaffed.pop(node, None)

    def agent_lost(self, node: str, silent: bool) -> None:
        self._jobs.agent_left(node)
        if silent:
            self.silent[node] = time.time() - self.site.timing.gone_s  # it may have booted before we knew

    async def ask_slurm(self) -> None:
        await self._jobs.check()
        nodes = await self._look_at_nodes()
        if nodes is None:
            return  # no answer says nothing about them
        self.unhealthy = frozenset(node.name for node in nodes if node.draining or node.down)
        back = self._back_from_the_dead(nodes)
        for name in back:
            del self.silent[name]
        if back:  # whoever waits was told not to take it
            self._ask_again_at, self._refused = 0.0, 0
            await self._jobs.give_back([job for job in self._jobs.jobs if job.role == JOIN and not job.nodes])
            self.look_after()

    async def _look_at_nodes(self) -> list[NodeInfo] | None:
        names = {*self.silent, *(node for job in self._jobs.jobs for node in job.nodes)}
        if not names or self.boss.closing:
            return []
        try:
            return await asyncio.to_thread(self.site.slurm.nodes, sorted(names))
        except DalsegnoError:
            return None

    def _back_from_the_dead(self, nodes: Sequence[NodeInfo]) -> list[str]:
        """Silent nodes whose slurmd was started since: rebuilt, or booted again."""
        started = {node.name: node.slurmd_started_at or 0 for node in nodes}  # in whole seconds
        return [name for name, lost_at in self.silent.items() if started.get(name, 0) >= math.floor(lost_at)]

    # Leaving

    def leaving(self, job: int) -> None:
        """At once: workers that save quickly end before Slurm has told what this is about.

        A node that joined is only lost when its own job has to go.
        """
        if any(each.id == job and each.role == JOIN for each in self._jobs.jobs):
            return
        self.boss.apply(Leaving())
        self.soon(self._leave())

    async def _leave(self) -> None:
        """An agent was signalled: the time is nearly up, we are preempted, or the user has cancelled. Slurm knows."""
        await self._jobs.check()
        if self.boss.ending:
            return
        if self.site.own_job is not None:
            self._leave_in_time(self.site.own_job)
        elif not any(job.role == NEXT for job in self._jobs.jobs):
            self.begin(NEXT)

    def _leave_in_time(self, own: int) -> None:
        """What does not save goes on from where it last did: in the job's next life, before this one is out of time."""
        ends_at = next((job.ends_at for job in self._jobs.jobs if job.id == own), None)
        if ends_at is not None:
            left_s = max(0.0, ends_at - LAST_MOMENT_S - time.time())
            asyncio.get_running_loop().call_later(left_s, lambda: self.soon(self.move()))

    async def move(self) -> None:
        """The next job starts when none of ours is left; the one whose batch step we live in is queued again.

        But first Slurm is asked once more: a user who has cancelled the job wants none of it.
        """
        await self._jobs.check()
        if self.boss.ending:
            return
        if self.site.own_job is not None:
            if await self._jobs.slurm.requeue(self.site.own_job):
                self.boss.rest("waits in the queue again")
            else:
                self.boss.stop(1, "Slurm does not queue its job again")
            return
        await self._jobs.give_back([job for job in self._jobs.jobs if job.role != NEXT])
        if not self._jobs.jobs:
            self.begin(NEXT)
        self.boss.keep()

    async def dismiss(self) -> None:
        await self._jobs.give_back(self._jobs.jobs)
        await self._jobs.sweep()

    def soon(self, work: Awaitable[None]) -> None:
        self.boss.soon(work)

    # Before and after our own death

    def saved(self) -> tuple[SavedJob, ...]:
        return self._jobs.saved()

    async def adopt(self, saved: tuple[SavedJob, ...]) -> bool:
        """A job that was queued again has none of the steps that it had in its former life."""
        own = self.site.own_job
        ours = own is None or any(job.job == own and any(map(_lives, job.steps)) for job in saved)
        if ours and saved:
            await self._jobs.adopt(saved)
        return ours and bool(saved)

    @property
    def jobs(self) -> tuple[int, ...]:
        return tuple(job.id for job in self._jobs.jobs if job.id is not None)

    @property
    def has_nodes(self) -> bool:
        return any(job.nodes for job in self._jobs.jobs)

    @property
    def waits(self) -> bool:
        return any(not job.nodes for job in self._jobs.jobs)


def _lives(step: SavedStep) -> bool:
    return start_ticks(step.process.pid) == step.process.start
