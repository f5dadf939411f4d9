"""Record when compute and communication start and end: on a CPU by the clock, on a GPU by events in its streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """One phase of a step, in seconds from the start of the step."""

    kind: str  # forward, backward, update or communicate
    label: str
    begin_s: float
    end_s: float


@dataclass
class _Open:
    """A span that may not have ended yet, with the time stamps of the watch."""

    kind: str
    label: str
    begin: Any
    end: Any = None


class Watch:
    """Records spans while it is `on`. It costs nothing while it is off, as in timed steps."""

    def __init__(self) -> None:
        self.on = False
        self._zero: Any = None
        self._spans: list[_Open] = []

    def start_step(self) -> None:
        self._spans = []
        self._zero = self.stamp()

    def begin(self, kind: str, label: str = "") -> _Open | None:
        if not self.on:
            return None
        self._spans.append(_Open(kind, label, self.stamp()))
        return self._spans[-1]

    def end(self, span: _Open | None) -> None:
        if span and span.end is None:
            span.end = self.stamp()

    @contextmanager
    def span(self, kind: str, label: str = "") -> Iterator[None]:
        span = self.begin(kind, label)
        yield
        self.end(span)

    def ends_with(self, span: _Open | None, work: Any) -> None:
        """End the span when the operation ends, in the background.

        For a GPU the callback runs early, but on a stream that waits for the operation: an event there marks its end.
        """
        if span:
            work.get_future().add_done_callback(lambda _: self.end(span))

    def spans(self) -> list[Span]:
        since = self.seconds_since
        return [Span(each.kind, each.label, since(each.begin), since(each.end)) for each in self._spans]

    def stamp(self) -> Any:
        return time.perf_counter()

    def seconds_since(self, stamp: Any) -> float:
        return float(stamp - self._zero)


class CudaWatch(Watch):
    """Uses GPU events, because a clock would show when work was queued, not when it ran."""

    def stamp(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_since(self, stamp: Any) -> float:
        torch.cuda.synchronize()
        return float(self._zero.elapsed_time(stamp)) / 1000
