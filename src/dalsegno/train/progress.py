"""What a worker tells its agent of its progress: for `runs`, for the metrics, and so that a hang is noticed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dalsegno.train.agent import AgentLink
from dalsegno.train.schedule import StepClock
from dalsegno.train.snapshots import Counted

TELL_S = 0.5


class ProgressReporter:
    """Tells now and then: a message for each step would be noticed in the step."""

    def __init__(self, agent: AgentLink | None, generation: int, rank: int) -> None:
        self._agent, self._generation, self._rank = agent, generation, rank
        self._told_at, self._told_step = float("-inf"), 0
        self._samples = 0
        self._last: tuple[StepClock, dict[str, Any], Counted] | None = None

    def tell(self, step: int, clock: StepClock, loss: Any, figures: dict[str, Any], counted: Counted) -> None:
        self._samples += figures.get("samples") or 0
        told = {name: _detached(value) for name, value in dict(figures, loss=loss).items() if name != "samples"}
        self._last = clock, told, counted
        now = time.monotonic()
        if self._agent is None or now - self._told_at < TELL_S:
            return
        passed, self._told_at = now - self._told_at, now
        rates = {"samples_per_s": self._samples / passed} if self._samples and math.isfinite(passed) else {}
        self._samples = 0
        self._agent.tell(self._about(step, rates))

    def tell_end(self, step: int) -> None:
        """No step follows: nobody need take the quiet for a hang."""
        if self._agent is not None:
            self._agent.tell({**self._about(step), "over": True})

    def _about(self, step: int, rates: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
        about: dict[str, Any] = {"step": step, "generation": self._generation}
        if self._rank == 0 and self._last is not None:  # the ranks keep step
            about["progress"] = {**_progress(*self._last), **rates}
        return about


def _progress(clock: StepClock, figures: Mapping[str, Any], counted: Counted) -> dict[str, float | None]:
    return {
        **{name: _number(value) for name, value in figures.items()},
        "step_s": clock.mean_s,
        "starting_s": clock.starting_s,
        "stepping_s": clock.stepping_s,
        "saving_s": clock.saving_s,
        "stall_s": counted.stall_s,
        "snapshots": counted.snapshots,
        "skipped": counted.skipped,
        "saves": counted.saves,
        "save_s": counted.save_s,
    }


def _detached(value: Any) -> Any:
    """A loss holds on to the whole graph that it came from."""
    return value.detach() if hasattr(value, "detach") else value


def _number(value: Any) -> float | None:
    """A loss on a GPU is read only when it is told, not at every step: reading it waits for the GPU."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
