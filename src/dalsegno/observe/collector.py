"""Collect metrics in the background and keep their text, so that a scrape only copies bytes.

Each source has a thread of its own: a slurmctld that does not answer must not delay the metrics of recovery, which
matter most at that time. Sources in a `SourceGroup` share a thread and are queried in order.

The series of a source that fails are removed until it succeeds again, and its success gauge is 0. The same applies to
a source that has not answered for two cycles and 30 s: old values are never served as current ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dalsegno import __version__
from dalsegno.errors import DalsegnoError
from dalsegno.observe.exposition import Family, labelled, render

log = logging.getLogger("collector")

INTERVAL_S = 15.0
_GRACE_S = 30.0  # a source that waits this long for a Slurm command is not late yet
_CLOSE_S = 2.0  # how long `close` waits for a query in progress


class MetricSource(Protocol):
    """A source of metrics. It may have two more attributes: `skipped_rows`, the number of rows that it could not parse
    in the last cycle, and `answered_at`, the time of its last real answer if it returns a cached one."""

    @property
    def name(self) -> str:
        """The label of the source in the collector's own metrics."""

    def collect(self) -> Sequence[Family]:
        """Return the families of this source. Raise DalsegnoError if they are not available in this cycle."""


@dataclass(frozen=True)
class SourceGroup:
    """Sources that share a thread and are collected one after the other, in this order."""

    sources: tuple[MetricSource, ...]


@dataclass(frozen=True)
class SourceStatus:
    """The result of the last collection from a source."""

    name: str
    success: bool = False
    duration_s: float = 0.0
    last_success_at: float = 0.0  # seconds since 1970; 0: never
    skipped_rows: int = 0
    fault: DalsegnoError | None = None  # why the last collection failed


@dataclass(frozen=True)
class _RenderedSource:
    """The text of a source's families, and when that text becomes too old."""

    status: SourceStatus
    text: bytes = b""
    late_s: float = 0.0  # after this time, the text is too old to be served


StatusFamilies = Callable[[Sequence[SourceStatus]], Sequence[Family]]


def status_families(sources: Sequence[SourceStatus]) -> list[Family]:
    """Return the collector's own metrics."""

    def each(suffix: str, help: str, value: Callable[[SourceStatus], float]) -> Family:
        return labelled(f"dalsegno_collector_{suffix}", help, ["source"], {(one.name,): value(one) for one in sources})

    return [
        labelled("dalsegno_build_info", "Version of Dal Segno; always 1.", ["version"], {(__version__,): 1}),
        each("success", "1 if the last collection succeeded; 0: the series are absent.", lambda one: int(one.success)),
        each("duration_seconds", "Duration of the last collection.", lambda one: one.duration_s),
        each(
            "last_success_timestamp_seconds",
            "Time of the last successful collection; 0 before the first.",
            lambda one: one.last_success_at,
        ),
        each("skipped_rows", "Rows that the last collection could not parse.", lambda one: one.skipped_rows),
    ]


class Collector:
    """Collects from all sources once per interval, in the background. A scrape returns the last text."""

    def __init__(
        self,
        sources: Sequence[MetricSource | SourceGroup],
        interval_s: float = INTERVAL_S,
        *,
        status: StatusFamilies = status_families,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = [one.sources if isinstance(one, SourceGroup) else (one,) for one in sources]
        self._interval_s, self._status, self._clock = interval_s, status, clock
        self._last = {one.name: _RenderedSource(SourceStatus(one.name)) for group in self._groups for one in group}
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._repeat, args=(group,), name="collector", daemon=True)
            for group in self._groups
        ]

    def start(self) -> None:
        """Collect in the background until the collector is closed."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop collecting."""
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_CLOSE_S)

    def collect(self) -> None:
        """Collect from all sources once, in this thread."""
        for group in self._groups:
            self._collect_group(group)

    def text(self) -> bytes:
        """Return the last text of each source that is not late, and the collector's own metrics."""
        now_s = self._clock()
        with self._lock:
            last = list(self._last.values())
        fresh = [one if now_s <= one.late_s else _RenderedSource(replace(one.status, success=False)) for one in last]
        return b"".join([*(one.text for one in fresh), render(self._status([one.status for one in fresh]))])

    def statuses(self) -> list[SourceStatus]:
        """Return the result of the last collection from each source."""
        with self._lock:
            return [one.status for one in self._last.values()]

    def _repeat(self, group: Sequence[MetricSource]) -> None:
        took_s = 0.0
        while not self._closed.is_set():
            began_s = self._clock()
            self._collect_group(group, took_s)
            took_s = self._clock() - began_s
            self._closed.wait(max(self._interval_s - took_s, took_s))  # query a slow source less often

    def _collect_group(self, group: Sequence[MetricSource], last_took_s: float = 0.0) -> None:
        late_after_s = _GRACE_S + 2 * max(self._interval_s, 2 * last_took_s)
        for source in group:
            if self._closed.is_set():
                return
            before = self._last[source.name].status
            status, text = self._collect_one(source, before)
            if status.success and not before.success:
                log.info("%s: collected in %.2f s", source.name, status.duration_s)
            with self._lock:
                self._last[source.name] = _RenderedSource(status, text, self._clock() + late_after_s)

    def _collect_one(self, source: MetricSource, before: SourceStatus) -> tuple[SourceStatus, bytes]:
        began_s, text, success = self._clock(), b"", False
        fault: DalsegnoError | None = None
        try:
            families = source.collect()
            self._claim(source.name, families)
            text, success = render(families), True
        except DalsegnoError as error:
            fault = error
            log.log(logging.DEBUG if before.fault else logging.WARNING, "%s: %s", source.name, error.what)
        except Exception as bug:  # a bug in one source must not stop the collection of others
            fault = DalsegnoError(f"internal error: {bug!r}", hint="the log has the traceback; please report it")
            log.exception("%s failed", source.name)
        status = SourceStatus(
            source.name,
            success=success,
            duration_s=self._clock() - began_s,
            last_success_at=getattr(source, "answered_at", time.time()) if success else before.last_success_at,
            skipped_rows=getattr(source, "skipped_rows", 0) if success else 0,
            fault=fault,
        )
        return status, text

    def _claim(self, source: str, families: Sequence[Family]) -> None:
        """Record which source provides each metric. Prometheus refuses a scrape in which a name occurs twice."""
        names = [family.name for family in families]
        with self._lock:
            owners = {name: self._owners.setdefault(name, source) for name in names}
        taken = sorted({name for name in names if owners[name] != source or names.count(name) > 1})
        if taken:
            raise ValueError(f"metrics occur twice: {', '.join(taken)}")
