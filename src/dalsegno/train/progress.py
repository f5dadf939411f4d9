"""Report a worker's progress to its agent, for `dalsegno runs`, for metrics and for hang detection."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from dalsegno.train.agent import AgentLink
from dalsegno.train.schedule import StepClock
from dalsegno.train.snapshots import SaveCounts

REPORT_S = 0.5


class ProgressReporter:
    """Sends progress at intervals: a message for each step would slow the steps down."""

    def __init__(self, agent: AgentLink | None, generation: int, rank: int) -> None:
        self._agent, self._generation, self._rank = agent, generation, rank
        self._sent_at = float("-inf")
        self._samples = 0
        self._last: tuple[StepClock, dict[str, Any], SaveCounts] | None = None

    def report(self, step: int, clock: StepClock, loss: Any, figures: dict[str, Any], counted: SaveCounts) -> None:
        self._samples += figures.get("samples") or 0
        shown = {name: _detached(value) for name, value in dict(figures, loss=loss).items() if name != "samples"}
        self._last = clock, shown, counted
        now = time.monotonic()
        if self._agent is None or now - self._sent_at < REPORT_S:
            return
        passed, self._sent_at = now - self._sent_at, now
        rates = {"samples_per_s": self._samples / passed} if self._samples and math.isfinite(passed) else {}
        self._samples = 0
        self._agent.send(self._message(step, rates))

    def report_end(self, step: int) -> None:
        """Report that no step follows, so that the silence is not taken for a hang."""
        if self._agent is not None:
            self._agent.send({**self._message(step), "over": True})

    def _message(self, step: int, rates: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
        message: dict[str, Any] = {"step": step, "generation": self._generation}
        if self._rank == 0 and self._last is not None:  # one report is enough: all ranks do the same steps
            message["progress"] = {**_progress(*self._last), **rates}
        return message


def _progress(clock: StepClock, figures: Mapping[str, Any], counted: SaveCounts) -> dict[str, float | None]:
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
    """Return the value without its autograd graph, which a loss would keep alive."""
    return value.detach() if hasattr(value, "detach") else value


def _number(value: Any) -> float | None:
    """Return the value as a number. Reading a loss from a GPU waits for the GPU, so this is not done at every step."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
