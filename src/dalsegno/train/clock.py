"""How long steps take, and where a worker's time goes. Pure: times in, figures out."""

from __future__ import annotations

from dataclasses import dataclass, field

_NEW = 0.1  # weight of the newest step in the running mean


@dataclass
class Clock:
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
