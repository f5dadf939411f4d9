"""When no step for so long is a hang, and when ranks that have not returned are idle. Pure: times in, a verdict out."""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

from dalsegno.launch.words import Work

TIMES_THE_MEDIAN = 10
LEAST_S = 60.0
ENOUGH_STEPS = 5  # before that nobody knows how long a step takes: the first ones compile and warm up
KEPT = 100
IDLE_S = 30.0  # of ranks that do nothing, while others have returned
BUSY_SHARE = 0.02  # of a processor: what threads that only wait use is less
BUSY_BYTES = 1 << 20


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


class Activity:
    """What the ranks of one generation that have not returned yet have done, by the work that their nodes report."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Work, float]] = {}  # of each rank: its work when it last did some, and when

    def heard(self, rank: int, work: Work, now: float) -> None:
        before, at = self._last.get(rank, (None, now))
        if before is None or _is_busy(before, work, now - at):
            self._last[rank] = work, now

    def idle_s(self, ranks: Collection[int], now: float) -> float:
        """For how long none of them has done anything; 0 while one of them is unknown."""
        return min((now - self._last[rank][1] if rank in self._last else 0.0 for rank in ranks), default=0.0)


def _is_busy(before: Work, now: Work, passed_s: float) -> bool:
    return now.cpu_s - before.cpu_s > BUSY_SHARE * max(1.0, passed_s) or now.moved - before.moved > BUSY_BYTES
