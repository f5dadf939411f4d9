"""When no step for so long is a hang. Pure: marks and times in, a verdict out."""

from __future__ import annotations

from statistics import median

TIMES_THE_MEDIAN = 10
LEAST_S = 60.0
ENOUGH_STEPS = 5  # before that nobody knows how long a step takes: the first ones compile and warm up
KEPT = 100


class Marks:
    """The steps of one generation, as its workers report them. `timeout_s`: 0 is never, None is by the steps."""

    def __init__(self, timeout_s: float | None, now: float) -> None:
        self.timeout_s = timeout_s
        self.last = now
        self._steps: list[float] = []
        self._newest = -1
        self._over = False

    def step(self, number: int, now: float) -> None:
        """Any rank's; the first one to reach a step makes the mark."""
        if number <= self._newest:
            return
        if self._newest >= 0:
            self._steps = [*self._steps[-KEPT:], now - self.last]
        self._newest, self.last = number, now

    def rest(self) -> None:
        """The loop is over: what comes now (a last save, an evaluation) makes no steps."""
        self._over = True

    def sign(self, at: float) -> None:
        """Another sign of progress, where no steps are reported: output."""
        if not self._steps:
            self.last = max(self.last, at)

    def limit_s(self) -> float | None:
        if self._over:
            return None
        if self.timeout_s is not None:
            return self.timeout_s or None
        if len(self._steps) < ENOUGH_STEPS:
            return None
        return max(LEAST_S, TIMES_THE_MEDIAN * median(self._steps))

    def overdue_s(self, now: float) -> float | None:
        """For how long there was no step, once that is too long."""
        limit = self.limit_s()
        return now - self.last if limit is not None and now - self.last > limit else None
