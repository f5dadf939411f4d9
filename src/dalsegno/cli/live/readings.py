"""Keep the last answer from each source, and record which sources do not answer. Each source is polled in its own
thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dalsegno.cli.live.facts import LiveFacts, LiveSource, SourceHealth, live_facts
from dalsegno.errors import DalsegnoError
from dalsegno.health.messages import GpuReading
from dalsegno.overview.facts import FailingScrape, ObservedRun, Overview, RecoveryView

if TYPE_CHECKING:
    from dalsegno.recovery.journal.event import Event
    from dalsegno.targets.base import ClusterStatus

EVENTS = 500  # number of events that are kept
SMALL_CLUSTER = 64  # number of nodes; larger clusters are polled less often
MIN_INTERVAL_S, MAX_INTERVAL_S = 1.0, 5.0


class LiveSources(Protocol):
    """The queries of the view. A query may raise DalsegnoError if its source does not answer, but `status` returns a
    status that says so."""

    @property
    def controller(self) -> Path | None: ...

    @property
    def sees_all_runs(self) -> bool: ...

    def status(self) -> ClusterStatus: ...

    def recovery_view(self) -> RecoveryView | None: ...

    def events(self, since: int) -> Sequence[Event]: ...

    def runs(self, *, progress: bool = False, ended: bool = False) -> Sequence[ObservedRun]: ...

    def failing_scrapes(self) -> tuple[FailingScrape, ...]: ...

    def gpus(self) -> Mapping[str, tuple[GpuReading, ...]]: ...


def default_interval_s(nodes: int) -> float:
    """Return the seconds between two polls of a source: 1 for small clusters, up to 5 for large ones."""
    return min(max(MIN_INTERVAL_S, nodes / SMALL_CLUSTER), MAX_INTERVAL_S)


class LiveReadings:
    """The last answers from all sources. Threads may poll different sources at the same time."""

    def __init__(self, sources: LiveSources, clock: Callable[[], float] = time.time) -> None:
        self._sources, self._clock, self._lock = sources, clock, threading.Lock()
        self._status: ClusterStatus | None = None  # the last status
        self._known: ClusterStatus | None = None  # the last status in which Slurm answered
        self._view: RecoveryView | None = None
        self._events: list[Event] = []
        self._runs: tuple[ObservedRun, ...] = ()
        self._failing_scrapes: tuple[FailingScrape, ...] = ()
        self._gpus: Mapping[str, tuple[GpuReading, ...]] = {}
        self._health = {source: SourceHealth() for source in LiveSource}
        self._first_error: DalsegnoError | OSError | None = None

    def poll(self, source: LiveSource) -> None:
        """Poll one source once. If it does not answer, its last answer is kept."""
        ask = {
            LiveSource.SLURM: self._ask_slurm,
            LiveSource.CONTROLLER: self._ask_controller,
            LiveSource.RUNS: self._ask_runs,
        }[source]
        try:
            error = ask()
        except (DalsegnoError, OSError) as failure:
            error = str(failure)
            if source is LiveSource.SLURM:
                self._first_error = self._first_error or failure
        self.note(source, error)

    def note(self, source: LiveSource, error: str) -> None:
        """Record that a source has answered, or why it has not."""
        with self._lock:
            before, now = self._health[source], self._clock()
            self._health[source] = before.failed(now, error) if error else before.answered(now)

    def _ask_slurm(self) -> str:
        status, failing = self._sources.status(), self._sources.failing_scrapes()
        with self._lock:
            self._status, self._failing_scrapes = status, failing
            self._known = status if status.jobs is not None or self._known is None else self._known
        return "" if status.jobs is not None else "no answer"

    def _ask_controller(self) -> str:
        view = self._sources.recovery_view()
        since = self._events[-1].id if self._events else -EVENTS
        new, gpus = self._sources.events(since), self._sources.gpus()
        with self._lock:
            self._view, self._gpus = view, gpus
            self._events = [*self._events, *new][-EVENTS:]
        return ""

    def _ask_runs(self) -> str:
        runs = tuple(self._sources.runs(progress=True, ended=True))
        with self._lock:
            self._runs = runs
        return ""

    @property
    def node_count(self) -> int:
        return len(self._status.nodes) if self._status else 0

    def facts(self) -> LiveFacts | None:
        """Return the known facts; None before the first poll of Slurm. If no poll of Slurm has succeeded, raise the
        error of the first."""
        with self._lock:
            if self._status is None:
                if self._first_error is not None:
                    raise self._first_error
                return None
            controller = self._health[LiveSource.CONTROLLER]
            asked = controller.answered_at is not None or controller.silent_since is not None
            silent = controller.silent_since is not None
            present = Overview(
                self._status,
                None if silent else self._view,
                has_controller=self._sources.controller is not None and asked,
                runs=self._runs,
                all_runs=self._sources.sees_all_runs and not silent,
                events=tuple(self._events),
                gpus={} if silent else self._gpus,
                failing_scrapes=self._failing_scrapes,
            )
            slurm = self._health[LiveSource.SLURM]
            return live_facts(present, self._known or self._status, self._view, slurm, controller)


class Poller:
    """Polls all sources at intervals, each in its own thread, so that a silent source does not delay the others."""

    def __init__(self, readings: LiveReadings, interval_s: float | None, changed: Callable[[], None]) -> None:
        self._readings, self._interval_s, self._changed = readings, interval_s, changed
        self._stop = threading.Event()
        self.paused = False

    def start(self) -> None:
        for source in LiveSource:
            # The threads are daemons, so that quitting does not wait for a query in progress.
            threading.Thread(target=self._run, args=(source,), name=f"poll-{source.value}", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self, source: LiveSource) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            if not self.paused:
                self._poll(source)
            took = time.monotonic() - started
            interval = self._interval_s or default_interval_s(self._readings.node_count)
            self._stop.wait(max(interval - took, took))  # a slow source is polled at most half of the time

    def _poll(self, source: LiveSource) -> None:
        try:
            self._readings.poll(source)
        except Exception as error:  # for example an invalid answer: the view must show that this source fails
            self._readings.note(source, f"{type(error).__name__}: {error}")
        self._changed()
