"""Metrics of recovery, from the controller's journal: events, times, nodes, spares, budgets.

The journal is read through a separate connection, and each update reads only new rows. A new process reads all rows
that the journal still has, so its counters do not restart at zero.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health import Remedy
from dalsegno.observe.exposition import Family, Histogram, HistogramFamily, MetricType, counter, gauge, labelled
from dalsegno.recovery.decisions.actions import KINDS, Action, Drain, Hold, Repair, Return, SetDown
from dalsegno.recovery.decisions.budget import budget_left
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.records import DAY_S, MarkKind, NodeRecords
from dalsegno.recovery.journal.event import EventKind, EventStage
from dalsegno.recovery.journal.store import BUSY_S, read_records
from dalsegno.recovery.runs.run_records import RunRecords
from dalsegno.runs.metrics import KnownRun
from dalsegno.spec.facts import facts_from_json

# Histograms of durations, from finished actions


DETECT_S = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0)
DRAIN_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
REPLACE_S = (1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0)
RETRY_S = 120.0  # a later action within this time after a failed one counts as its retry


@dataclass(frozen=True)
class FinishedAction:
    """An action from the journal that was carried out or failed."""

    action: Action
    begun_at: float
    ended_at: float
    failed: bool = False


@dataclass
class RecoveryTimes:
    """The durations of recovery. Actions must be added in the order in which they ended."""

    detect: Histogram = field(default_factory=lambda: Histogram(DETECT_S))
    drain: Histogram = field(default_factory=lambda: Histogram(DRAIN_S))
    replace: Histogram = field(default_factory=lambda: Histogram(REPLACE_S))
    # Maps a node to the times at which the first of its consecutive failed actions began and the last one ended.
    _failed: dict[str, tuple[float, float]] = field(default_factory=dict)
    _replacing: dict[str, float] = field(default_factory=dict)  # node -> when its replacement began

    def add(self, done: FinishedAction) -> None:
        action = done.action
        if isinstance(action, (Drain, SetDown)):
            self._add_drain(action, done)
        elif isinstance(action, Repair) and action.how is Remedy.REPLACE:
            self._replacing.setdefault(action.node, done.begun_at)
        elif isinstance(action, (Return, Hold)) and not done.failed and action.node in self._replacing:
            self.replace = self.replace.observe(_passed(self._replacing.pop(action.node), done.ended_at))

    def _add_drain(self, action: Drain | SetDown, done: FinishedAction) -> None:
        began, ended = self._failed.pop(action.node, (done.begun_at, done.begun_at))
        began = began if done.begun_at - ended < RETRY_S else done.begun_at
        if done.failed:
            self._failed[action.node] = began, done.ended_at
            return
        self.drain = self.drain.observe(_passed(began, done.ended_at))
        if isinstance(action, SetDown) and action.heard_at:
            self.detect = self.detect.observe(_passed(action.heard_at, began))
        # A replacement after which the node was taken out again did not succeed, so its duration is not counted.
        self._replacing.pop(action.node, None)


def _passed(since: float, until: float) -> float:
    return max(0.0, until - since)  # the clock may have been set back


# Counts from the journal


_TIMED = ", ".join(f"'{name}'" for name, kind in KINDS.items() if kind in (Drain, SetDown, Repair, Return, Hold))
FaultKey = tuple[str, str, str]  # node, check, code
_ACTION = "rowid, kind, body, begun_at, ended_at, error"


@dataclass
class JournalCounts:
    """The counts from one journal file, as far as the file was read."""

    events: Counter[tuple[EventKind, EventStage]] = field(default_factory=Counter)
    failed_replacements: int = 0
    times: RecoveryTimes = field(default_factory=RecoveryTimes)
    faults: dict[FaultKey, float] = field(default_factory=dict)  # when a node was last taken out for a fault
    skipped_rows: int = 0
    _event: int = 0  # id of the last event that was read
    _mark: int = 0  # id of the last mark that was read
    _action: int = 0  # row of the last action that was read
    _unfinished: frozenset[int] = frozenset()

    def read_new(self, db: sqlite3.Connection) -> None:
        """Read the rows added since the last call, and the actions that have ended since then."""
        grouped = "SELECT kind, stage, COUNT(*), MAX(id) FROM events WHERE id > ? GROUP BY kind, stage"
        rows = db.execute(grouped, (self._event,))
        for kind, stage, count, last in rows.fetchall():
            self.events[EventKind(kind), EventStage(stage)] += count
            self._event = max(self._event, last)
        for last, body in db.execute("SELECT id, body FROM marks WHERE id > ? ORDER BY id", (self._mark,)).fetchall():
            self._mark = last
            self.failed_replacements += json.loads(body).get("kind") == MarkKind.REPLACED_BADLY.value
        finished = self._finished(db)
        for done in sorted(finished, key=lambda each: each.ended_at):
            self.times.add(done)
            self._add_fault(done)

    def _add_fault(self, done: FinishedAction) -> None:
        action = done.action
        if isinstance(action, (Drain, SetDown)):
            # The code of a notice contains a time, so each notice would create a new time series.
            notice = action.fault.notice
            key = action.node, action.fault.check, notice.kind.value if notice else action.fault.code
            self.faults[key] = max(self.faults.get(key, 0.0), done.begun_at)

    def _finished(self, db: sqlite3.Connection) -> list[FinishedAction]:
        left = ",".join(map(str, sorted(self._unfinished))) or "-1"
        where = f"(rowid > ? OR rowid IN ({left})) AND kind IN ({_TIMED})"
        rows = db.execute(f"SELECT {_ACTION} FROM actions WHERE {where} ORDER BY rowid", (self._action,)).fetchall()
        self._action = max([self._action, *(row[0] for row in rows)])
        self._unfinished = frozenset(row[0] for row in rows if row[4] is None)
        return [done for row in rows if row[4] is not None and (done := self._parse(*row[1:]))]

    def _parse(self, kind: str, body: str, begun_at: float, ended_at: float, error: str) -> FinishedAction | None:
        try:
            action = facts_from_json(KINDS[kind], json.loads(body))
        except (DalsegnoError, ValueError, TypeError, AttributeError):  # another version wrote this row
            self.skipped_rows += 1
            return None
        return FinishedAction(action, begun_at, ended_at, bool(error))


class RecoveryJournalReader:
    """Reads a controller's journal. The controller may run or restart meanwhile, and the file may be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._version = -1
        self.counts, self.records = JournalCounts(), NodeRecords()

    def read(self) -> None:
        """Update `counts` and `records`. Raise DalsegnoError if the journal cannot be read."""
        try:
            db = self._open()
            version = int(db.execute("PRAGMA data_version").fetchone()[0])
            if version == self._version:
                return
            db.execute("BEGIN")
            try:
                self.counts.read_new(db)
                self.records = read_records(db)
            finally:
                db.execute("ROLLBACK")
            self._version = version
        except (sqlite3.Error, OSError, ValueError) as error:
            self.close()
            hint = "`dalsegno status` shows whether the controller runs"
            raise DalsegnoError(f"{self._path} cannot be read: {error}", hint=hint) from error

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db, self._version = None, -1

    def _open(self) -> sqlite3.Connection:
        about = os.stat(self._path)
        file = (about.st_dev, about.st_ino)
        if self._db is None or file != self._file:
            self.close()
            if file != self._file:
                self.counts = JournalCounts()
            self._file = file
            self._db = sqlite3.connect(f"{self._path.as_uri()}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None)
            self._db.execute("PRAGMA query_only=ON")
        return self._db


# Runs that the controller supervises


def list_runs(records: Path) -> list[KnownRun]:
    """Return the runs that the controller supervises, read from the folder with their records."""
    found, _ = RunRecords(records).read()
    return [KnownRun(Path(record.folder), record.uid) for record in found.values()]


# Metric families


_STAGES: Mapping[EventKind, tuple[EventStage, ...]] = {
    **dict.fromkeys(EventKind, (EventStage.DONE, EventStage.FAILED)),
    **dict.fromkeys(
        (EventKind.EVIDENCE, EventKind.RESET, EventKind.REBOOT, EventKind.REPLACE),
        (EventStage.BEGUN, EventStage.DONE, EventStage.FAILED),
    ),
    **dict.fromkeys((EventKind.TURN, EventKind.NOTE), (EventStage.INFO, EventStage.SUSPECTED)),
    **dict.fromkeys((EventKind.SIGHT, EventKind.PASSPORT, EventKind.AUTOMATION), (EventStage.INFO,)),
    EventKind.UNKNOWN: (),
}
PHASES = tuple(phase for phase in NodePhase if phase is not NodePhase.UNKNOWN)
Samples = dict[tuple[str, ...], float]
HELD = tuple(held for held in HeldAction if held is not HeldAction.NO)


def count_families(counts: JournalCounts) -> list[Family]:
    """Return the families for events, failed replacements and durations."""
    known = {(kind, stage): 0 for kind, stages in _STAGES.items() for stage in stages}
    events: Samples = {_event_labels(*key): count for key, count in {**known, **counts.events}.items()}
    times = counts.times

    def histogram(name: str, help: str, value: Histogram) -> Family:
        return HistogramFamily(f"dalsegno_recovery_{name}_seconds", help, (), {(): value})

    return [
        labelled(
            "dalsegno_recovery_events_total",
            "Events in the journal, by kind and stage.",
            ("kind", "stage"),
            events,
            MetricType.COUNTER,
        ),
        counter(
            "dalsegno_recovery_replacements_failed_total",
            "Replacements that failed, or whose node did not pass validation.",
            counts.failed_replacements,
        ),
        histogram("detect", "From the last message of a lost node to the decision to set it down.", times.detect),
        histogram("drain", "From the decision to take a node out to Slurm's confirmation, with retries.", times.drain),
        histogram(
            "replace", "From the start of a replacement to the validated node in service or as a spare.", times.replace
        ),
    ]


def fault_family(counts: JournalCounts, now: float) -> Family:
    """Return the family for alerts on nodes that had a fault, even if they were repaired between two scrapes.

    The value is the time of the fault. A count could not show the first fault of a node, because no zero comes before
    it.
    """
    recent: Samples = {key: at for key, at in counts.faults.items() if now - at < DAY_S}
    about = "When recovery last took the node out of service for this fault, within the last day."
    return labelled("dalsegno_recovery_last_fault_timestamp_seconds", about, ("node", "check", "code"), recent)


def _event_labels(kind: EventKind, stage: EventStage) -> tuple[str, str]:
    return kind.value, stage.value or "info"


def record_families(records: NodeRecords, nodes: Iterable[str]) -> list[Family]:
    """Return the families for phases, spares, held-back actions and the pause. `nodes` are the cluster's nodes."""
    known = [records.get(name) for name in nodes]
    phases = Counter(node.phase for node in known)
    held = Counter(node.held_back for node in known)
    spares: Samples = {("ready",): phases[NodePhase.SPARE], ("lent",): phases[NodePhase.LENT]}
    return [
        labelled(
            "dalsegno_recovery_nodes",
            "Nodes by phase of their lifecycle.",
            ("phase",),
            {(phase.value.replace(" ", "_"),): phases[phase] for phase in PHASES},
        ),
        labelled("dalsegno_recovery_spares", "Spares that are ready, and lent to runs.", ("state",), spares),
        labelled(
            "dalsegno_recovery_held_back",
            "Nodes with a fault for which nothing is done, by reason.",
            ("reason",),
            {(reason.name.lower(),): held[reason] for reason in HELD},
        ),
        labelled(
            "dalsegno_recovery_notice_deadline_timestamp_seconds",
            "When the cloud provider ends the instance of a node that was drained for its notice.",
            ("node", "kind"),
            {
                (node.node, notice.kind.value): notice.deadline
                for node in known
                if node.fault and (notice := node.fault.notice)
            },
        ),
        gauge("dalsegno_recovery_paused", "1 while an administrator has paused recovery.", int(records.paused)),
    ]


def budget_family(
    records: NodeRecords, policy: Policy, partitions: Mapping[str, tuple[str, ...]], now: float
) -> Family:
    """Return the family that shows how many nodes of each partition may still be taken out."""
    left: Samples = {(name,): budget_left(records, policy, name, nodes, now) for name, nodes in partitions.items()}
    about = "Nodes that recovery could take out of service now, before a limit stops it."
    return labelled("dalsegno_recovery_budget_left", about, ("partition",), left)


@dataclass(frozen=True)
class RecoveryScope:
    """Data that the journal does not contain: the present policy, and the nodes of each partition."""

    policy: Policy
    partitions: Mapping[str, tuple[str, ...]]


class RecoveryMetrics:
    """The source of all recovery metrics. `scope` returns the cluster's present policy and partitions."""

    name = "recovery"

    def __init__(
        self, journal: Path, scope: Callable[[], RecoveryScope], clock: Callable[[], float] = time.time
    ) -> None:
        self._journal, self._scope, self._clock = RecoveryJournalReader(journal), scope, clock

    @property
    def skipped_rows(self) -> int:
        return self._journal.counts.skipped_rows

    def collect(self) -> list[Family]:
        """Return all families. Raise DalsegnoError if the journal cannot be read."""
        self._journal.read()
        scope, records = self._scope(), self._journal.records
        nodes = sorted({name for names in scope.partitions.values() for name in names})
        now = self._clock()
        return [
            *count_families(self._journal.counts),
            fault_family(self._journal.counts, now),
            *record_families(records, nodes),
            budget_family(records, scope.policy, scope.partitions, now),
        ]
