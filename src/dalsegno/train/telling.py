"""What a worker tells its agent of its progress: for `runs`, for the metrics, and so that a hang is noticed."""

from __future__ import annotations

import math
import time
from typing import Any

from dalsegno.train.agent import AgentLink
from dalsegno.train.clock import Clock
from dalsegno.train.keeping import Counted

TELL_S = 0.5


class Teller:
    """Tells now and then: a message for each step would be noticed in the step."""

    def __init__(self, agent: AgentLink | None, generation: int, rank: int) -> None:
        self._agent, self._generation, self._rank = agent, generation, rank
        self._told_at, self._told_step = float("-inf"), 0
        self._samples = 0

    def tell(self, step: int, clock: Clock, loss: Any, figures: dict[str, Any], counted: Counted) -> None:
        self._samples += figures.get("samples") or 0
        now = time.monotonic()
        if self._agent is None or now - self._told_at < TELL_S:
            return
        passed, self._told_at = now - self._told_at, now
        rates = {"samples_per_s": self._samples / passed} if self._samples and math.isfinite(passed) else {}
        self._samples = 0
        progress = {
            **{name: _number(value) for name, value in dict(figures, loss=loss).items() if name != "samples"},
            **rates,
            "step_s": clock.mean_s,
            "starting_s": clock.starting_s,
            "stepping_s": clock.stepping_s,
            "saving_s": clock.saving_s,
            "stall_s": counted.stall_s,
            "snapshots": counted.snapshots,
            "skipped": counted.skipped,
            "saves": counted.saves,
        }
        told = {"step": step, "generation": self._generation}
        self._agent.tell(dict(told, progress=progress) if self._rank == 0 else told)  # the ranks keep step

    def tell_end(self, step: int) -> None:
        """No step follows: nobody need take the quiet for a hang."""
        if self._agent is not None:
            self._agent.tell({"step": step, "generation": self._generation, "over": True})


def _number(value: Any) -> float | None:
    """A loss on a GPU is read only when it is told, not at every step: reading it waits for the GPU."""
    try:
        number = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
