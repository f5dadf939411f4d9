"""A run that stands still: seen, asked where it is, and its generation ended so that another can start."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

from dalsegno.launch.agents import Agents
from dalsegno.launch.events import Hung
from dalsegno.launch.folder import RunFolder
from dalsegno.launch.generations import Phase, Run
from dalsegno.launch.hangs import Marks
from dalsegno.launch.staff import Boss
from dalsegno.launch.telling import Teller

STACKS_S = 10.0  # a node takes at most seven; one that has not answered by then is stuck as well


class Watched(Boss, Protocol):
    """The coordinator, as far as a hang concerns it."""

    run: Run
    agents: Agents
    told: Teller
    folder: RunFolder


class HangWatch:
    """Over one generation after the other."""

    def __init__(self, of: Watched, timeout_s: float | None, stacks_s: float = STACKS_S) -> None:
        self._of, self._timeout_s, self._stacks_s = of, timeout_s, stacks_s
        self._asked: set[str] = set()  # agents that have not captured their workers' stacks yet
        self._all_told = asyncio.Event()
        self.generation_started()

    def generation_started(self) -> None:
        self._began = time.monotonic()
        self._marks, self._hanging = Marks(self._timeout_s, self._began), False

    @property
    def age_s(self) -> float:
        """Of the present generation."""
        return time.monotonic() - self._began

    def stepped(self, generation: int, step: int) -> None:
        if generation == self._of.run.generation:
            self._marks.step(step, time.monotonic())

    def rest(self, generation: int) -> None:
        """Its script has no more steps to do."""
        if generation == self._of.run.generation:
            self._marks.rest()

    def look(self) -> None:
        """Called again and again."""
        run = self._of.run
        if run.phase is not Phase.RUNNING or self._hanging:
            return
        if self._timeout_s:
            self._marks.sign(self._of.told.last_output(run.generation))
        overdue_s = self._marks.overdue_s(time.monotonic())
        if overdue_s is not None:
            self._hanging = True
            self._of.soon(self._end(run.generation, overdue_s))

    async def _end(self, generation: int, overdue_s: float) -> None:
        why = f"no step for {overdue_s:.0f} s; where the ranks were is in {self._of.folder.all_stacks}"
        self._of.note(why)
        await self._capture_stacks(generation)
        self._of.apply(Hung(generation, why, self.age_s))

    async def _capture_stacks(self, generation: int) -> None:
        """On all nodes at once, before the workers are killed."""
        group = self._of.run.group
        self._asked = set(group.agents) & self._of.present if group else set()
        self._all_told.clear()
        for agent in self._asked:
            self._of.agents.send(agent, {"stacks": generation})
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._all_told.wait(), self._stacks_s)

    def told_stacks(self, agent: str) -> None:
        """An agent has captured them, or never will: it is gone."""
        self._asked.discard(agent)
        if not self._asked:
            self._all_told.set()
