"""The controller's journal, one SQLite file: nodes, actions, events, check results, budgets, GPUs.

Every action is recorded before and after it is carried out. A connection belongs to one thread. Other threads open
their own, and `refresh` reads their changes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health import GpuIdentity, Verdict
from dalsegno.recovery.decisions.actions import KINDS, Action, ChangePhase, ContactChange, Note
from dalsegno.recovery.decisions.change import apply_change, apply_contact_change, begin_action, end_action
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.records import DAY_S, BudgetMark, MarkKind, NodeRecord, NodeRecords
from dalsegno.recovery.journal.event import Event, EventKind, EventStage, jobs_in_old_text
from dalsegno.recovery.runs.run_hints import CheckChange
from dalsegno.spec.facts import facts_from_json, facts_to_json

# The file and its tables


BUSY_S = 10.0  # how long one connection waits for another's write
MAX_WAL_BYTES = 16 << 20
_SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (node TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS marks (id INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS actions (
    id TEXT PRIMARY KEY, node TEXT NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
    begun_at REAL NOT NULL, ended_at REAL, error TEXT, told TEXT);
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, node TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    stage TEXT NOT NULL DEFAULT '', jobs TEXT);
CREATE INDEX IF NOT EXISTS events_of_node ON events (node, id);
CREATE TABLE IF NOT EXISTS passports (
    uuid TEXT PRIMARY KEY, node TEXT NOT NULL, slot INTEGER NOT NULL, serial TEXT NOT NULL, model TEXT NOT NULL,
    since REAL NOT NULL, sent_away_at REAL);
CREATE TABLE IF NOT EXISTS checks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, node TEXT NOT NULL, name TEXT NOT NULL,
    verdict TEXT NOT NULL, text TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS checks_of_node ON checks (node, id);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# Columns that older files lack.
_ADDED = {"stage": "TEXT NOT NULL DEFAULT ''", "jobs": "TEXT"}


def open_file(path: Path) -> sqlite3.Connection:
    """Open the journal. Retry if two processes create it at once: SQLite does not wait in that case."""
    until = time.monotonic() + BUSY_S
    while True:
        db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        try:
            os.chmod(path, 0o600)
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # in a new file, the space of deleted rows can be freed
            db.execute("PRAGMA journal_mode=WAL")
            db.execute(f"PRAGMA journal_size_limit={MAX_WAL_BYTES}")
            db.execute("PRAGMA synchronous=FULL")
            db.executescript(_SCHEMA)
            _add_columns(db)
            return db
        except sqlite3.OperationalError as error:
            db.close()
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _add_columns(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    known = {row[1] for row in db.execute("PRAGMA table_info(events)")}
    for name, declared in _ADDED.items():
        if name not in known:
            db.execute(f"ALTER TABLE events ADD COLUMN {name} {declared}")
    db.execute("COMMIT")


MAX_EVENTS = 1000  # maximum number of events per answer
MAX_KEPT = 100_000  # maximum number of events, actions and check results each; the oldest are deleted once a day
_EVENT = "id, at, node, kind, text, stage, jobs"
MARKS_KEPT_S = 60 * DAY_S  # twice the 30 days that `read_records` needs


@dataclass(frozen=True)
class CheckEvent:
    """A recorded check result: failed, warned, or passed again."""

    at: float
    node: str
    check: str
    verdict: str
    text: str


@dataclass(frozen=True)
class GpuHistory:
    """A GPU: where it was seen, since when, and whether its machine was replaced."""

    uuid: str
    node: str
    slot: int
    serial: str
    model: str
    since: float
    sent_away_at: float | None = None


class Journal:
    """The journal file, and the records as they were last read."""

    def __init__(self, path: Path) -> None:
        try:
            self.db = open_file(path)
            self._version = self._data_version()
            self.records = read_records(self.db)
            self._is_together = False
        except (sqlite3.Error, OSError, ValueError) as error:
            hint = "move the file away: the controller then starts a new one from Slurm's drain reasons"
            raise DalsegnoError(f"{path} cannot be read: {error}", hint=hint) from error

    def close(self) -> None:
        self.db.close()

    def tidy(self, now: float | None = None) -> None:
        """Delete old rows.

        Unfinished actions are kept, even old ones. Each check's last verdict on each node is kept too, because the
        next verdict is compared with it.
        """
        old = (time.time() if now is None else now) - MARKS_KEPT_S
        with self._changing(self.records):
            self.db.execute("DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?", (MAX_KEPT,))
            self.db.execute(
                "DELETE FROM checks WHERE id <= (SELECT MAX(id) FROM checks) - ?"
                " AND id NOT IN (SELECT MAX(id) FROM checks GROUP BY node, name)", (MAX_KEPT,),
            )  # fmt: skip
            self.db.execute(
                "DELETE FROM actions WHERE ended_at IS NOT NULL"
                " AND rowid <= (SELECT MAX(rowid) FROM actions) - ?", (MAX_KEPT,),
            )  # fmt: skip
            self.db.execute("DELETE FROM marks WHERE at < ? AND id < (SELECT MAX(id) FROM marks)", (old,))
        self.db.executescript("PRAGMA incremental_vacuum;")  # `execute` would free one page only
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    # Methods that read

    def refresh(self) -> NodeRecords:
        """Return the records, read again if another connection has written."""
        if self._data_version() != self._version:
            self._version = self._data_version()
            self.records = read_records(self.db)
        return self.records

    def action(self, id: str) -> tuple[Action, float] | None:
        """Return an action and when it was begun; None if the id is unknown."""
        row = self.db.execute("SELECT kind, body, begun_at FROM actions WHERE id = ?", (id,)).fetchone()
        return (facts_from_json(KINDS[row[0]], json.loads(row[1])), row[2]) if row else None

    def events(self, since: int = 0, node: str = "", most: int = MAX_EVENTS) -> list[Event]:
        """Return the events after the one with this id, oldest first."""
        where = "id > ? AND node = ?" if node else "id > ?"
        rows = self.db.execute(
            f"SELECT {_EVENT} FROM events WHERE {where} ORDER BY id LIMIT ?",
            (since, *([node] if node else []), most),
        )
        return [_event(*row) for row in rows]

    def last_events(self, node: str, most: int) -> list[Event]:
        """Return the last events of a node, oldest first."""
        rows = self.db.execute(f"SELECT {_EVENT} FROM events WHERE node = ? ORDER BY id DESC LIMIT ?", (node, most))
        return [_event(*row) for row in rows][::-1]

    def last_checks(self, node: str, most: int) -> list[CheckEvent]:
        """Return the last recorded check results of a node, oldest first."""
        rows = self.db.execute(
            "SELECT at, node, name, verdict, text FROM checks WHERE node = ? ORDER BY id DESC LIMIT ?", (node, most)
        )
        return [CheckEvent(*row) for row in rows][::-1]

    def last_verdicts(self) -> list[tuple[str, str, Verdict]]:
        """Return node, check and last recorded verdict of every check."""
        latest = "SELECT MAX(id) FROM checks GROUP BY node, name"
        rows = self.db.execute(f"SELECT node, name, verdict FROM checks WHERE id IN ({latest})")
        return [(node, name, Verdict(verdict)) for node, name, verdict in rows]

    def last_event(self) -> int:
        return int(self.db.execute("SELECT COALESCE(MAX(id), 0) FROM events").fetchone()[0])

    def gpu_history(self, node: str = "") -> list[GpuHistory]:
        rows = self.db.execute(
            "SELECT uuid, node, slot, serial, model, since, sent_away_at FROM passports ORDER BY node, slot, since"
        )
        return [gpu for row in rows if node in ("", (gpu := GpuHistory(*row)).node)]

    # Methods that write. Each is one transaction, except within `together`.

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write all changes of this block in one transaction.

        Each transaction waits for the disk and compares all records, which is slow for thousands of changes.
        """
        before, self._is_together = self.records, True
        try:
            yield
            if self.db.in_transaction:
                self._write_records(before, self.records)
                self.commit()
        except BaseException:
            self.records = before
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise
        finally:
            self._is_together = False

    def begin(self, action: Action, now: float, partitions: tuple[str, ...] = ()) -> str:
        """Record an action before it is carried out and return its id."""
        id = os.urandom(6).hex()
        with self._changing(begin_action(self.records, action, id, now, partitions)):
            self.db.execute(
                "INSERT INTO actions (id, node, kind, body, begun_at) VALUES (?, ?, ?, ?, ?)",
                (id, action.node, type(action).__name__, json.dumps(facts_to_json(action)), now),
            )
            if action.slow:
                text = f"starting to {action.summary}"
                self._event(now, action.node, action.kind, text, EventStage.BEGUN, action.concerns)
        return id

    def end(
        self, id: str, action: Action, result: str, error: str, now: float, policy: Policy, partitions: tuple[str, ...]
    ) -> None:
        """Record the outcome of an action."""
        with self._changing(end_action(self.records, action, id, error, now, policy, partitions)):
            self.db.execute(
                "UPDATE actions SET ended_at = ?, error = ?, told = ? WHERE id = ?", (now, error, result, id)
            )
            text, stage = (action.failure(error), EventStage.FAILED) if error else (result, EventStage.DONE)
            self._event(now, action.node, action.kind, text, stage, action.concerns)

    def record_change(self, action: ChangePhase | Note, now: float, partitions: tuple[str, ...] = ()) -> None:
        with self._changing(apply_change(self.records, action, now, partitions)):
            self._event(now, action.node, action.kind, action.summary, action.stage, action.concerns)

    def record_contact(self, action: ContactChange, now: float) -> None:
        records = apply_contact_change(self.records, action, now)
        with self._changing(records):
            rows = [("blind", str(int(records.blind))), ("saw_at", str(records.saw_at))]
            self.db.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)
            self._event(now, "", action.kind, action.summary)

    def record_seen(self, records: NodeRecords) -> None:
        """Save records that contain new observations. No event is added."""
        if records != self.records:
            with self._changing(records):
                pass

    def record_gpus(self, node: str, gpus: Iterable[GpuIdentity], now: float) -> None:
        """Record the GPUs of a node."""
        rows = [(gpu.uuid, node, gpu.index, gpu.serial, gpu.model, now) for gpu in gpus if gpu.uuid]
        with self._changing(self.records):
            self.db.executemany(
                "INSERT INTO passports (uuid, node, slot, serial, model, since) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (uuid) DO UPDATE SET node = excluded.node, slot = excluded.slot, since = excluded.since"
                " WHERE node != excluded.node OR slot != excluded.slot",
                rows,
            )

    def record_checks(self, news: Iterable[CheckChange], now: float) -> None:
        rows = [(now, each.node, each.check, each.verdict.value, each.text) for each in news]
        if rows:
            with self._changing(self.records):
                self.db.executemany("INSERT INTO checks (at, node, name, verdict, text) VALUES (?, ?, ?, ?, ?)", rows)

    def forgive(self, name: str, who: str, now: float) -> list[GpuHistory]:
        """Allow replaced GPUs to come back, and return them. `name` is the id of a GPU, or a node for all its GPUs."""
        self.refresh()
        found = [each for each in self.gpu_history() if each.sent_away_at and name in (each.uuid, each.node)]
        records = replace(self.records, replaced_gpus=self.records.replaced_gpus - {each.uuid for each in found})
        with self._changing(records):
            for each in found:
                self.db.execute("UPDATE passports SET sent_away_at = NULL WHERE uuid = ?", (each.uuid,))
                self._event(
                    now, each.node, EventKind.PASSPORT, f"GPU {each.uuid} was forgiven by {who} and may come back"
                )
        return found

    def record_request(self, node: str, text: str, now: float, stage: EventStage, jobs: tuple[int, ...] = ()) -> None:
        """Record what a person did in the web page or with `inject`."""
        self.refresh()
        with self._changing(self.records):
            self._event(now, node, EventKind.REQUEST, text, stage, jobs)

    def pause(self, paused: bool, who: str, now: float) -> None:
        """Pause or resume recovery. Resuming resets the limits."""
        self.refresh()
        marks = () if paused else (BudgetMark(MarkKind.RESUMED, "", now),)
        records = replace(self.records, paused=paused, marks=(*self.records.marks, *marks))
        with self._changing(records):
            self.db.execute("INSERT OR REPLACE INTO settings VALUES ('paused', ?)", (str(int(paused)),))
            self._event(now, "", EventKind.AUTOMATION, f"{'paused' if paused else 'resumed'} by {who}")

    def _event(
        self,
        now: float,
        node: str,
        kind: EventKind,
        text: str,
        stage: EventStage = EventStage.INFO,
        jobs: tuple[int, ...] = (),
    ) -> None:
        self.db.execute(
            "INSERT INTO events (at, node, kind, text, stage, jobs) VALUES (?, ?, ?, ?, ?, ?)",
            (now, node, kind.value, text, stage.value, json.dumps(jobs)),
        )

    @contextmanager
    def _changing(self, records: NodeRecords) -> Iterator[None]:
        """Write changed records in one transaction. The records in memory change after the commit."""
        if self._is_together:
            if not self.db.in_transaction:
                self.db.execute("BEGIN IMMEDIATE")
            yield
            self.records = records
            return
        self.db.execute("BEGIN IMMEDIATE")
        try:
            self._write_records(self.records, records)
            yield
            self.commit()
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise
        self.records = records

    def commit(self) -> None:
        self.db.execute("COMMIT")

    def _write_records(self, before: NodeRecords, records: NodeRecords) -> None:
        for name, node in records.nodes.items():
            known = before.nodes.get(name)
            if known is not node and known != node:
                body = json.dumps(facts_to_json(node))
                self.db.execute("INSERT OR REPLACE INTO nodes VALUES (?, ?)", (name, body))
        for mark in records.marks[len(before.marks) :]:
            self.db.execute("INSERT INTO marks (at, body) VALUES (?, ?)", (mark.at, json.dumps(facts_to_json(mark))))
        for uuid in records.replaced_gpus - before.replaced_gpus:
            self.db.execute(
                "INSERT INTO passports VALUES (?, '', 0, '', '', 0, strftime('%s'))"
                " ON CONFLICT (uuid) DO UPDATE SET sent_away_at = excluded.sent_away_at",
                (uuid,),
            )

    def _data_version(self) -> int:
        return int(self.db.execute("PRAGMA data_version").fetchone()[0])


def _event(id: int, at: float, node: str, kind: str, text: str, stage: str, jobs: str | None) -> Event:
    """Return the event of one row. Older rows do not list their jobs."""
    named = jobs_in_old_text(text) if jobs is None else tuple(json.loads(jobs))
    return Event(id, at, node, EventKind(kind), text, EventStage(stage), named)


def read_records(db: sqlite3.Connection) -> NodeRecords:
    """Return the records of all nodes."""
    nodes = [facts_from_json(NodeRecord, json.loads(body)) for (body,) in db.execute("SELECT body FROM nodes")]
    (latest,) = db.execute("SELECT COALESCE(MAX(at), 0) FROM marks").fetchone()
    old = latest - 30 * DAY_S  # older marks no longer count
    marks = db.execute("SELECT body FROM marks WHERE at > ? ORDER BY id", (old,)).fetchall()
    replaced_gpus = db.execute("SELECT uuid FROM passports WHERE sent_away_at IS NOT NULL").fetchall()
    settings = dict(db.execute("SELECT name, value FROM settings").fetchall())
    return NodeRecords(
        {node.node: node for node in nodes},
        tuple(facts_from_json(BudgetMark, json.loads(body)) for (body,) in marks),
        frozenset(uuid for (uuid,) in replaced_gpus),
        settings.get("paused") == "1",
        settings.get("blind") == "1",
        float(settings.get("saw_at", 0)),
    )
