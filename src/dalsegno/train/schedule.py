"""At which steps a run takes snapshots, saves, and stops. Pure: steps, times and the board's words in, decisions out.

All ranks have to decide the same for the same step. What hangs on a clock or a measurement is therefore decided by the
first rank alone and written on the board for a step to come; a wish to stop is written by whoever hears of it first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dalsegno.train.options import Auto, Interval, Measured, Seconds, Steps, auto_steps

READ_S = 0.5  # how often a rank looks at the board
RETRY_S = 30.0  # until a save that failed is tried again
RUN_AHEAD = 1  # steps a processor may be ahead of its GPU, and so one rank ahead of another


class Due(NamedTuple):
    """What to do after a step."""

    memory: bool = False
    disk: bool = False
    stop: bool = False


def due(step: int, memory: Interval, disk: Interval, words: Mapping[str, Any], last: int | None = None) -> Due:
    """The same on every rank that has read the same words. After the last step there is nothing to stop."""
    stop = "stop" in words and step >= words["stop"] and step != last
    return Due(
        memory=stop or _by_steps(step, memory) or _by_word(step, words.get("memory")),
        disk=stop or _by_steps(step, disk) or step == words.get("disk"),
        stop=stop,
    )


def _by_steps(step: int, every: Interval) -> bool:
    return isinstance(every, Steps) and step % every.every == 0


def _by_word(step: int, word: list[int] | None) -> bool:
    """From a step on, every so many."""
    return word is not None and step >= word[0] and (step - word[0]) % word[1] == 0


def soon(step: int, step_s: float, world: int = 2) -> int:
    """The next step before which every rank will have looked at the board. `step_s`: of the fastest steps.

    A rank alone need not wait for others. Where steps are longer than the time between two looks, every rank looks
    after each step, and none finishes one that another has not begun.
    """
    if world == 1:
        return step
    return step + math.ceil(READ_S / max(step_s, 1e-6)) + RUN_AHEAD


class Leader:
    """The first rank's part: turns times and measurements into steps."""

    def __init__(self, memory: Interval, disk: Interval, now: float) -> None:
        self.memory, self.disk = memory, disk
        self._every = 0
        self._save_at = self._next_save(now)
        self._failed: int | None = None
        self._disk_at = -1  # the save that was announced last
        self.behind = False  # a save was due while another was under way

    def words(
        self,
        step: int,
        now: float,
        step_s: float,
        stall_s: float | None,
        failed: int | None = None,
        ahead: int = 0,
        busy: bool = False,
    ) -> dict[str, Any]:
        """What to write on the board now. `stall_s`: what a snapshot costs. `failed`: when a save last did. `ahead`:
        from which step on it can count. `busy`: the first rank's save ends with that of the last, so nobody else's
        is under way when it is not."""
        found: dict[str, Any] = {}
        every = self._memory_steps(step_s, stall_s)
        if every and not self._near(every):
            self._every = every
            found["memory"] = [ahead, every]
        if failed != self._failed:  # a full disk may have been emptied by then
            self._failed, self._save_at = failed, min(self._save_at, now + RETRY_S)
        is_due = now >= self._save_at and step > self._disk_at  # the last one announced is not still to come
        self.behind = self.behind or (is_due and busy)
        if is_due and not busy:
            self._save_at = self._next_save(now)
            self._disk_at = found["disk"] = ahead
        return found

    def _next_save(self, now: float) -> float:
        return now + (self.disk.every if isinstance(self.disk, Seconds) else math.inf)

    def _memory_steps(self, step_s: float, stall_s: float | None) -> int:
        if isinstance(self.memory, Seconds):
            return max(1, round(self.memory.every / max(step_s, 1e-6)))
        return auto_steps(Measured(step_s, stall_s)) if isinstance(self.memory, Auto) else 0

    def _near(self, every: int) -> bool:
        """Measurements waver; the interval follows only what has really changed."""
        return self._every > 0 and 0.8 <= every / self._every <= 1.25


# ---- How long steps take, and where a worker's time goes. Pure: times in, figures out.


_NEW = 0.1  # weight of the newest step in the running mean


@dataclass
class StepClock:
    """Of one worker, from its start. Seconds by what they were spent on."""

    began: float
    mean_s: float = 0.0  # running mean of a step, snapshots not counted
    stepping_s: float = 0.0
    starting_s: float = 0.0  # until the first step began
    saving_s: float = 0.0  # the training stood still for snapshots
    steps: int = 0
    recent_s: tuple[float, ...] = ()  # the last steps
    _mark: float = field(default=0.0, repr=False)

    @property
    def fastest_s(self) -> float:
        """Of the last steps: no rank will be much faster than that in the next ones."""
        return min(self.recent_s, default=0.0)

    def begin(self, now: float) -> None:
        """The first step begins."""
        self.starting_s, self._mark = now - self.began, now

    def step(self, now: float) -> None:
        taken = now - self._mark
        self._mark = now
        self.steps += 1
        self.stepping_s += taken
        self.recent_s = (*self.recent_s[-19:], taken)
        self.mean_s = taken if self.steps < 3 else (1 - _NEW) * self.mean_s + _NEW * taken  # the first one warms up

    def stall(self, now: float) -> None:
        """A snapshot was taken since the step ended."""
        self.saving_s += now - self._mark
        self._mark = now
