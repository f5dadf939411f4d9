"""Decide at which steps a run takes snapshots, saves and stops. No I/O.

All ranks must make the same decision for the same step. Rank 0 therefore makes every decision that depends on a clock
or a measurement, and writes the decision to the rank store for a later step. Any rank that is asked to stop writes the
request to the store; the earliest request counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dalsegno.train.options import Auto, Interval, Measured, Seconds, Steps, auto_steps

READ_S = 0.5  # how often a rank reads the rank store
RETRY_S = 30.0  # delay before a failed save is retried
RUN_AHEAD = 1  # number of steps that a CPU may be ahead of its GPU, and therefore one rank ahead of another


class DueActions(NamedTuple):
    """The actions that are due after a step."""

    memory: bool = False
    disk: bool = False
    stop: bool = False


def due(step: int, memory: Interval, disk: Interval, agreed: Mapping[str, Any], last: int | None = None) -> DueActions:
    """Return the actions that are due after a step.

    `last` is the last step of the training, after which no stop is needed. All ranks that have read the same entries of
    the rank store get the same result.
    """
    stop = "stop" in agreed and step >= agreed["stop"] and step != last
    return DueActions(
        memory=stop or _by_steps(step, memory) or _by_start(step, agreed.get("memory")),
        disk=stop or _by_steps(step, disk) or step == agreed.get("disk"),
        stop=stop,
    )


def _by_steps(step: int, every: Interval) -> bool:
    return isinstance(every, Steps) and step % every.every == 0


def _by_start(step: int, start: list[int] | None) -> bool:
    """Return whether the step is due. `start` contains the first step that is due, and the interval."""
    return start is not None and step >= start[0] and (step - start[0]) % start[1] == 0


def next_common_step(step: int, step_s: float, world: int = 2) -> int:
    """Return the first step that no rank begins before it has read the store again.

    With a single rank, this is the current step. `step_s` is the duration of the fastest steps. A rank reads the store
    every READ_S seconds, or after each step if steps take longer. A rank may also be RUN_AHEAD steps ahead of another.
    """
    if world == 1:
        return step
    return step + math.ceil(READ_S / max(step_s, 1e-6)) + RUN_AHEAD


class Leader:
    """Decides on rank 0, for all ranks, at which steps they take snapshots and save to disk."""

    def __init__(self, memory: Interval, disk: Interval, now: float) -> None:
        self.memory, self.disk = memory, disk
        self._every = 0
        self._save_at = self._next_save(now)
        self._failed: int | None = None
        self._disk_at = -1  # the step of the last announced save
        self.behind = False  # whether a save was due while another was running

    def decide(
        self,
        step: int,
        now: float,
        step_s: float,
        stall_s: float | None,
        failed: int | None = None,
        ahead: int = 0,
        busy: bool = False,
    ) -> dict[str, Any]:
        """Return the entries to write to the rank store now.

        `stall_s` is how long the last snapshot stalled training. `failed` is the step of the last failed save. `ahead`
        is the first step that all ranks can act on. `busy` says whether rank 0 is saving. Its save ends after the saves
        of all other ranks.
        """
        found: dict[str, Any] = {}
        every = self._memory_steps(step_s, stall_s)
        if every and not self._near(every):
            self._every = every
            found["memory"] = [ahead, every]
        if failed != self._failed:  # retry later, because a full disk may then have space again
            self._failed, self._save_at = failed, min(self._save_at, now + RETRY_S)
        is_due = now >= self._save_at and step > self._disk_at  # true only after the last announced save has begun
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
        """Return whether the new interval is close to the current one.

        Small changes are ignored, because they may be noise.
        """
        return self._every > 0 and 0.8 <= every / self._every <= 1.25


# Step times

_NEW = 0.1  # weight of the newest step in the running mean


@dataclass
class StepClock:
    """The time that one worker has spent on each activity since its start, in seconds."""

    began: float
    mean_s: float = 0.0  # running mean of a step's duration, without snapshots
    stepping_s: float = 0.0
    starting_s: float = 0.0  # time until the first step began
    saving_s: float = 0.0  # time that training stalled for snapshots
    steps: int = 0
    recent_s: tuple[float, ...] = ()  # durations of the last 20 steps
    _mark: float = field(default=0.0, repr=False)

    @property
    def fastest_s(self) -> float:
        """The duration of the fastest recent step. No rank will be much faster in the next steps."""
        return min(self.recent_s, default=0.0)

    def begin(self, now: float) -> None:
        """Record that the first step begins."""
        self.starting_s, self._mark = now - self.began, now

    def step(self, now: float) -> None:
        taken = now - self._mark
        self._mark = now
        self.steps += 1
        self.stepping_s += taken
        self.recent_s = (*self.recent_s[-19:], taken)
        self.mean_s = taken if self.steps < 3 else (1 - _NEW) * self.mean_s + _NEW * taken  # the first steps are slow

    def stall(self, now: float) -> None:
        """Record that a snapshot was taken since the step ended."""
        self.saving_s += now - self._mark
        self._mark = now
