"""The live snapshot of the cluster: query the sources while a page is open, and wake the pages after a change.

Each source is queried in its own thread, so that a slurmctld that does not answer does not delay the controller's data.
While no page is open, nothing is queried.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from dalsegno.errors import DalsegnoError
from dalsegno.web.assessment import Assessor
from dalsegno.web.snapshot import (
    ClusterPicture,
    ControllerPart,
    HostPart,
    NodeView,
    RunPicture,
    SlurmPart,
    SourceTrouble,
    node_views,
)
from dalsegno.web.sources import PictureSources, SourceSilent

log = logging.getLogger("web.live")

LINGER_S = 20.0  # the sources are queried for this long after the last request, because the page may be reloaded
SMALL, LARGE = 64, 2048  # up to SMALL nodes, a cluster is small; up to LARGE, medium
# Seconds between two queries, for small, medium and large clusters. A slow source is queried less often.
CONTROLLER_S = (0.5, 0.8, 2.0)
SLURM_S = (0.8, 0.8, 4.0)
RUNS_S = (0.8, 0.8, 2.0)
HOSTS_S = (1.0, 3.0, 10.0)
FRESH_S = 10.0  # a snapshot up to this age is shown without waiting for a new one
SLOW_S = 1.0  # pages do not wait for a query that takes longer: Slurm's commands take 9 s if slurmctld does not answer
LATE_S = 3.0  # a source that takes longer is reported as silent
SILENT_TEXT = {
    "slurm": "slurmctld does not answer",
    "controller": "the controller does not answer",
    "runs": "the files of runs cannot be read",
    "hosts": "the state of the hosts' daemons is unknown",
}
FIRST_S = 3.0  # how long the first page waits for the first snapshot


class LivePicture:
    """The current snapshot, and the threads that update it. All methods may be called by any thread."""

    def __init__(self, sources: PictureSources, cluster: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources, self._clock = sources, clock
        self._changed = threading.Condition()
        # Snapshot numbers do not restart with the observer: otherwise a browser could mistake a new snapshot for the
        # one that it shows.
        self._snapshot = ClusterPicture(int(time.time() * 10) % 10**9, cluster=cluster)
        self._slurm, self._controller, self._runs = SlurmPart(), ControllerPart(), tuple[RunPicture, ...]()
        self._hosts = HostPart()
        self._joined: tuple[SlurmPart, ControllerPart] | None = None
        self._nodes: Mapping[str, NodeView] = {}
        self._assessor = Assessor()
        self._troubles: dict[str, SourceTrouble] = {}
        self._answered: dict[str, float] = {}  # when each query last ended, with or without success
        self._began: dict[str, float] = {}  # when each query that is still running began
        self._slow: set[str] = set()
        self._watchers, self._wanted_until = 0, 0.0
        self._closed = False
        self._soon = {name: threading.Event() for name in SILENT_TEXT}

    def start(self) -> None:
        for name, ask, intervals in (
            ("slurm", self._ask_slurm, SLURM_S),
            ("controller", self._ask_controller, CONTROLLER_S),
            ("runs", self._ask_runs, RUNS_S),
            ("hosts", self._ask_hosts, HOSTS_S),
        ):
            args = (name, ask, intervals)
            threading.Thread(target=self._repeat, args=args, name=f"live-{name}", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.ask_soon()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the snapshot up to date during the `with` block."""
        with self._changed:
            self._watchers += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._watchers -= 1
                self._wanted_until = self._clock() + LINGER_S

    def ask_soon(self) -> None:
        """Query all sources again at once, after an action changed something."""
        for event in self._soon.values():
            event.set()

    def fresh(self, most_s: float = FIRST_S) -> ClusterPicture:
        """Return a recent snapshot. If there is none, wait for one, but at most `most_s` seconds."""
        until = self._clock() + most_s
        with self._changed:
            self._wanted_until = max(self._wanted_until, self._clock() + LINGER_S)
            self._changed.notify_all()
            while not self.is_fresh() and self._clock() < until and not self._closed:
                self._changed.wait(0.2)
            return self._snapshot

    @property
    def closed(self) -> bool:
        return self._closed

    def current(self) -> ClusterPicture:
        with self._changed:
            return self._snapshot

    def wait(self, after: int, most_s: float) -> ClusterPicture:
        """Return the snapshot as soon as its number is larger than `after`, but wait at most `most_s` seconds."""
        until = self._clock() + most_s
        with self._changed:
            while self._snapshot.number <= after and not self._closed and (left := until - self._clock()) > 0:
                self._changed.wait(left)
            return self._snapshot

    def is_fresh(self) -> bool:
        """Return whether every source answered recently. Sources that are known to be slow do not count."""
        now = self._clock()
        slow = {*self._slow, *(name for name, began in list(self._began.items()) if now - began > SLOW_S)}
        needed = set(self._soon) - slow - {"hosts"}  # "hosts" is slow too: it imports the target
        return all(self._answered.get(name, float("-inf")) >= now - FRESH_S for name in needed)

    def _is_wanted(self) -> bool:
        return self._watchers > 0 or self._clock() < self._wanted_until

    def _repeat(self, name: str, ask: Callable[[], None], intervals: tuple[float, float, float]) -> None:
        while self._wait_until_wanted():
            self._soon[name].clear()
            began = self._began[name] = self._clock()
            try:
                ask()
                self._note(name, None)
            except DalsegnoError as error:
                first = error.what.partition("\n")[0]
                self._note(name, SourceTrouble(name, first, silent=isinstance(error, SourceSilent)))
            except Exception:  # a bug in one source must not stop the updates from others
                log.exception("%s failed", name)
                self._note(name, SourceTrouble(name, f"reading {name} failed; see the log of the observer"))
            took = self._clock() - began
            del self._began[name]
            (self._slow.add if took > SLOW_S else self._slow.discard)(name)
            self._soon[name].wait(max(self._interval(intervals) - took, took))  # a slow source is queried less often

    def _interval(self, intervals: tuple[float, float, float]) -> float:
        nodes = len(self._snapshot.nodes)
        return intervals[0] if nodes <= SMALL else intervals[1] if nodes <= LARGE else intervals[2]

    def _wait_until_wanted(self) -> bool:
        with self._changed:
            while not self._closed and not self._is_wanted():
                self._changed.wait(60.0)
            return not self._closed

    def _ask_slurm(self) -> None:
        part = self._sources.slurm()
        self._slurm = self._slurm if part == self._slurm else part

    def _ask_controller(self) -> None:
        before, part = self._controller, self._sources.controller()
        self._controller = before if part == before else part
        if self._controller.events[-1:] != before.events[-1:] or self._controller.nodes != before.nodes:
            self._soon["slurm"].set()  # the controller has acted, so Slurm's state has probably changed, too

    def _ask_runs(self) -> None:
        self._runs = self._sources.runs()

    def _ask_hosts(self) -> None:
        self._hosts = self._sources.hosts()

    def _note(self, name: str, trouble: SourceTrouble | None) -> None:
        """Record that a query has ended. If the data has changed, create the next snapshot. Wake all waiting pages."""
        with self._changed:
            self._answered[name] = self._clock()
            self._troubles.pop(name, None)
            if trouble:
                self._troubles[name] = trouble
            made = self._made()
            if made != replace(self._snapshot, number=0, at=made.at):
                self._snapshot = replace(made, number=self._snapshot.number + 1)
            else:
                self._snapshot = replace(self._snapshot, at=made.at)
            self._changed.notify_all()

    def _all_troubles(self) -> dict[str, SourceTrouble]:
        """Return the trouble of each source that failed, or that takes long to answer the current query."""
        now = self._clock()
        late = [name for name, began in list(self._began.items()) if now - began > LATE_S]
        return {**{name: SourceTrouble(name, SILENT_TEXT[name], silent=True) for name in late}, **self._troubles}

    def _made(self) -> ClusterPicture:
        parts = (self._slurm, self._controller)
        if self._joined is None or self._joined[0] is not parts[0] or self._joined[1] is not parts[1]:
            self._joined, self._nodes = parts, node_views(*parts)  # takes 20 ms for 1,000 nodes, so only after a change
        troubles = self._all_troubles()
        return ClusterPicture(
            0,
            time.time(),
            self._snapshot.cluster,
            self._nodes,
            self._slurm.jobs,
            self._runs,
            self._controller.events,
            self._controller.automation,
            tuple(troubles.values()),
            self._assessor.verdict(self._slurm, self._controller, self._hosts, self._runs, troubles),
        )
