"""A run leaves the nodes of its job, which are wanted back, and goes on in the next one, or in this one requeued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dalsegno.launch.events import Leaving
from dalsegno.launch.run_comment import JobRole
from dalsegno.launch.site import Site
from dalsegno.launch.slurm_jobs import SlurmJobs
from dalsegno.launch.staff import Boss

LAST_MOMENT_S = 10.0  # before the end of its job, a run that has not left by then is taken off it


class Departure:
    """`ask_for_next` has Slurm asked for the job in which the run goes on."""

    def __init__(self, site: Site, boss: Boss, jobs: SlurmJobs, ask_for_next: Callable[[], None]) -> None:
        self._site, self._boss, self._jobs, self._ask_for_next = site, boss, jobs, ask_for_next

    def announced(self, job: int) -> None:
        """At once: workers that save quickly end before Slurm has told what this is about.

        A node that joined is only lost when its own job has to go.
        """
        of_the_run = [each.id for each in self._jobs.jobs if each.role is not JobRole.JOIN]
        if job and job not in of_the_run:
            return
        self._boss.apply(Leaving())
        self._boss.soon(self._leave())

    async def _leave(self) -> None:
        """An agent was signalled: the time is nearly up, we are preempted, or the user has cancelled. Slurm knows."""
        await self._jobs.check()
        if self._boss.ending:
            return
        if self._site.own_job is not None:
            self._leave_in_time(self._site.own_job)
        elif not any(job.role is JobRole.NEXT for job in self._jobs.jobs):
            self._ask_for_next()

    def _leave_in_time(self, own: int) -> None:
        """What does not save goes on from where it last did: in the job's next life, before this one is out of time."""
        ends_at = next((job.ends_at for job in self._jobs.jobs if job.id == own), None)
        if ends_at is not None:
            left_s = max(0.0, ends_at - LAST_MOMENT_S - time.time())
            asyncio.get_running_loop().call_later(left_s, lambda: self._boss.soon(self.move()))

    async def move(self) -> None:
        """The next job starts when none of ours is left; the one whose batch step we live in is queued again.

        But first Slurm is asked once more: a user who has cancelled the job wants none of it.
        """
        await self._jobs.check()
        if self._boss.ending:
            return
        if self._site.own_job is not None:
            if await self._jobs.slurm.requeue(self._site.own_job):
                self._boss.rest("waits in the queue again")
            else:
                self._boss.stop(1, "Slurm does not queue its job again")
            return
        await self._jobs.give_back([job for job in self._jobs.jobs if job.role is not JobRole.NEXT], code=0)
        if not self._jobs.jobs:
            self._ask_for_next()
        self._boss.keep()
