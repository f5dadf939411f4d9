"""Report a worker's progress to its agent, for `dalsegno runs`, for metrics and for hang detection."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dalsegno.train.agent import AgentLink
from dalsegno.train.schedule import StepClock

REPORT_S = 0.5
COUNTED = ("samples", "tokens")  # figures that are reported as a rate
BUSY = "busy_s"  # name of the figure for the time of a step without waiting for other ranks


@dataclass
class SaveCounts:
    """The number and cost of snapshots and saves."""

    snapshots: int = 0
    skipped: int = 0
    stall_s: float | None = None  # how long the last snapshot stalled training
    saves: int = 0
    overtaken: int = 0
    save_s: float = 0.0


class ProgressReporter:
    """Sends progress at intervals, because a message for each step would slow down training.

    `objects` are the script's objects. A DDP model among them reports how long this rank has waited for others.
    """

    def __init__(self, agent: AgentLink | None, generation: int, rank: int, objects: Iterable[Any] = ()) -> None:
        self._agent, self._generation, self._rank = agent, generation, rank
        self._sent_at = float("-inf")
        self._counts = dict.fromkeys(COUNTED, 0.0)
        self._last: tuple[StepClock, dict[str, Any], SaveCounts] | None = None
        self._ddp = [each for each in map(_compiled_from, objects) if hasattr(each, _TIMES_OF_DDP)]

    def report(self, step: int, clock: StepClock, loss: Any, figures: dict[str, Any], counted: SaveCounts) -> None:
        for name in COUNTED:
            self._counts[name] += figures.get(name) or 0
        shown = {name: _detached(value) for name, value in dict(figures, loss=loss).items() if name not in COUNTED}
        self._last = clock, shown, counted
        now = time.monotonic()
        if self._agent is None or now - self._sent_at < REPORT_S:
            return
        passed, self._sent_at = now - self._sent_at, now
        found = self._counts.items() if math.isfinite(passed) else ()
        rates = {f"{name}_per_s": count / passed for name, count in found if count}
        self._counts = dict.fromkeys(COUNTED, 0.0)
        self._agent.send(self._message(step, rates))

    def report_end(self, step: int) -> None:
        """Report that no step follows, so that the silence does not count as a hang."""
        if self._agent is not None:
            self._agent.send({**self._message(step), "over": True})

    def _message(self, step: int, rates: Mapping[str, float] = MappingProxyType({})) -> dict[str, Any]:
        message: dict[str, Any] = {"step": step, "generation": self._generation, "rank": self._rank}
        if self._last is not None:
            message[BUSY] = self._busy_s(self._last[0].mean_s, self._last[1].get(BUSY))
        # Rank 0 reports for all ranks, because all ranks do the same steps.
        if self._rank == 0 and self._last is not None:
            message["progress"] = {**_progress(*self._last), **rates}
        return message

    def _busy_s(self, step_s: float, reported: Any) -> float:
        """Return the duration of a step without the time spent waiting for other ranks.

        Return the whole duration if the waiting time is unknown.
        """
        busy_s = None if reported is None else _number(reported)
        if busy_s is None:
            busy_s = step_s - sum(map(_waited_s, self._ddp))
        return min(max(busy_s, 0.01 * step_s), step_s)


_TIMES_OF_DDP = "_get_ddp_logging_data"


def _compiled_from(module: Any) -> Any:
    """Return the module that torch.compile has wrapped, else the module itself."""
    return getattr(module, "_orig_mod", module)


def _waited_s(ddp: Any) -> float:
    """Return how long a backward pass waited for the gradients of other ranks. DDP measures one pass in a hundred."""
    try:
        times = getattr(ddp, _TIMES_OF_DDP)()
        waited_ns = float(times["backward_comm_time"]) - float(times["backward_compute_comm_overlap_time"])
    # Nothing has been measured yet, or torch has another version.
    except (RuntimeError, KeyError, TypeError, ValueError):
        return 0.0
    return max(waited_ns, 0.0) / 1e9


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
