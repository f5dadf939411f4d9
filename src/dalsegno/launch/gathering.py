"""Taking agents in: those that come together at once, and after a while fewer than were asked for."""

from __future__ import annotations

import asyncio
from typing import Protocol

from dalsegno.launch.events import GaveUpWaiting, Joined
from dalsegno.launch.generations import Phase, Run
from dalsegno.launch.staff import Boss

TOGETHER_S = 10.0  # how long one waits for another that is starting


class Gatherer(Boss, Protocol):
    """The coordinator, as far as newcomers concern it."""

    run: Run


class Gathering:
    """Newcomers, and the patience of an elastic run, which starts smaller after `gather_s`."""

    def __init__(self, of: Gatherer, gather_s: float) -> None:
        self._of, self._gather_s = of, gather_s
        self._newcomers: list[Joined] = []
        self._waiting: asyncio.TimerHandle | None = None

    def take_in(self, event: Joined) -> None:
        """While a run that is smaller than asked for runs, newcomers that come together are taken in together."""
        run = self._of.run
        self._newcomers.append(event)
        smaller = run.phase is Phase.RUNNING and run.group and len(run.group.places) < self._of.wanted
        others = self._of.present - set(run.ready) - {each.agent for each in self._newcomers}
        if not (smaller and others):
            self._let_in()
        elif len(self._newcomers) == 1:
            asyncio.get_running_loop().call_later(TOGETHER_S, self._let_in)

    def _let_in(self) -> None:
        newcomers, self._newcomers = self._newcomers, []
        for event in newcomers:
            if event.agent in self._of.present:
                self._of.apply(event)

    def watch(self) -> None:
        """After every event: a run that could start smaller does so after a while."""
        run = self._of.run
        could = run.phase is Phase.GATHERING and not run.smaller and len(run.ready) >= run.shape.min_nodes
        if could and self._waiting is None:
            self._waiting = asyncio.get_running_loop().call_later(self._gather_s, self._give_up)
        elif not could and self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        self._of.apply(GaveUpWaiting())
