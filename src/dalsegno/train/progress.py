"""Report a worker's progress to its agent, for `dalsegno runs`, for metrics and for hang detection."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dalsegno.train.agent import AgentLink
from dalsegno.train.schedule import StepClock

REPORT_S = 0.5
COUNTED = ("samples", "tokens")  # figures that are reported as a rate
BUSY = "busy_s"  # name of the figure for a step's duration without the time spent waiting for other ranks


@dataclass
class SaveCounts:
    """The number and cost of snapshots and saves."""

    snapshots: int = 0
    skipped: int = 0
    stall_s: float | None = None  # how long the last snapshot stalled training
    saves: int = 0
    overtaken: int = 0
    save_s: float = 0.0


class WaitClock:
    """Measures how long this rank waits for others in a collective that a framework calls outside DDP."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._waited_s, self._steps, self._mean_s = 0.0, 0, 0.0
        self._pending: list[tuple[float, Any, Any]] = []  # seconds on the host, and two events of the GPU's stream

    def wrap(self, collective: Callable[..., Any], counts: Callable[[], bool]) -> Callable[..., Any]:
        """Return a function that calls the collective. It measures the calls for which `counts` returns True."""

        @functools.wraps(collective)
        def measured(*args: Any, **options: Any) -> Any:
            if not counts():
                return collective(*args, **options)
            began, first = self._now(), _mark_stream()
            result = collective(*args, **options)
            self._pending.append((self._now() - began, first, _mark_stream()))
            return result

        return measured

    def step_done(self) -> None:
        self._steps += 1

    def mean_s(self) -> float:
        """Return the waiting time per step since the last call. If there was no step, return the last result again."""
        # The GPU may not have reached an event that the host has recorded. Such a collective is counted later.
        done = [each for each in self._pending if each[2] is None or each[2].query()]
        self._pending = [each for each in self._pending if each not in done][-_MAX_PENDING:]
        # With NCCL, the host continues and the GPU waits for the collective. With other backends, the host waits.
        self._waited_s += sum(max(host_s, _between_s(first, last)) for host_s, first, last in done)
        if self._steps:
            self._mean_s = self._waited_s / self._steps
            self._waited_s, self._steps = 0.0, 0
        return self._mean_s


_MAX_PENDING = 1000


def _mark_stream() -> Any:
    """Record an event in the GPU's current stream, and return it; None if no GPU is used."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return None
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _between_s(first: Any, last: Any) -> float:
    return 0.0 if first is None or last is None else float(first.elapsed_time(last)) / 1000


class ProgressReporter:
    """Sends progress at intervals, because a message for each step would slow down training.

    `objects` are the script's objects. If they include a DDP model, its waiting times are subtracted from the step
    duration that is reported as busy.
    """

    def __init__(self, agent: AgentLink | None, generation: int, rank: int, objects: Iterable[Any] = ()) -> None:
        self._agent, self._generation, self._rank = agent, generation, rank
        self._sent_at = float("-inf")
        self._counts = dict.fromkeys(COUNTED, 0.0)
        self._last: tuple[StepClock, dict[str, Any], SaveCounts] | None = None
        self._ddp: list[Any] = []
        self._clocks: list[WaitClock] = []
        for each in objects:
            self.watch(each)

    def watch(self, thing: Any) -> None:
        """Read from this object how long the rank waits for others, if it is a DDP model or a WaitClock."""
        model = _compiled_from(thing)
        if isinstance(thing, WaitClock):
            self._clocks.append(thing)
        elif hasattr(model, _TIMES_OF_DDP) and not any(model is each for each in self._ddp):
            self._ddp.append(model)

    def report(self, step: int, clock: StepClock, loss: Any, figures: dict[str, Any], counted: SaveCounts) -> None:
        for name in COUNTED:
            self._counts[name] += figures.get(name) or 0
        shown = {name: _detached(value) for name, value in dict(figures, loss=loss).items() if name not in COUNTED}
        self._last = clock, shown, counted
        for each in self._clocks:
            each.step_done()
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
        # Only rank 0 sends the progress, because all ranks do the same steps.
        if self._rank == 0 and self._last is not None:
            message["progress"] = {**_progress(*self._last), **rates}
        return message

    def _busy_s(self, step_s: float, reported: Any) -> float:
        """Return the duration of a step without the time spent waiting for other ranks.

        A duration that the script reported itself as BUSY takes precedence. Return the whole duration if the waiting
        time is unknown, and always at least 1 % of it.
        """
        busy_s = None if reported is None else _number(reported)
        if busy_s is None:
            busy_s = step_s - sum(map(_waited_s, self._ddp)) - sum(each.mean_s() for each in self._clocks)
        return min(max(busy_s, 0.01 * step_s), step_s)


_TIMES_OF_DDP = "_get_ddp_logging_data"


def _compiled_from(module: Any) -> Any:
    """Return the original module if torch.compile has wrapped it, otherwise the module itself."""
    return getattr(module, "_orig_mod", module)


def _waited_s(ddp: Any) -> float:
    """Return how long a backward pass waited for the gradients of other ranks. DDP measures one pass in a hundred."""
    try:
        times = getattr(ddp, _TIMES_OF_DDP)()
        waited_ns = float(times["backward_comm_time"]) - float(times["backward_compute_comm_overlap_time"])
    # DDP has not measured a pass yet, or another version of torch reports other values.
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
    """Return the value as a finite number; None if it is not one.

    Do not call this at every step: reading a loss from a GPU waits for the GPU.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
