"""Tests of the metrics of recovery, from real journals."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.health import Remedy
from dalsegno.observe.exposition import Family, render
from dalsegno.recovery.decisions.actions import Action, ChangePhase, Drain, Hold, Note, Repair, Return, SetDown
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.journal.metrics import FinishedAction, RecoveryMetrics, RecoveryScope, RecoveryTimes
from dalsegno.recovery.journal.store import Journal

GONE = NodeFault("gone", Remedy.REPLACE, "no answer", gone=True)
POLICY = Policy(max_out=0.5, per_hour=4, spares=frozenset({"s-1"}))
SCOPE = RecoveryScope(POLICY, {"train": ("a-1", "a-2", "a-3", "a-4", "s-1")})
TRAIN = ("train",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "recovery.sqlite"


@pytest.fixture
def journal(path: Path) -> Journal:
    return Journal(path)


def metrics(path: Path, now: float = 1000.0) -> RecoveryMetrics:
    return RecoveryMetrics(path, lambda: SCOPE, lambda: now)


def samples(families: Iterable[Family]) -> dict[str, float]:
    lines = [line for line in render(families).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def carry_out(journal: Journal, action: Action, begun: float, ended: float, error: str = "") -> None:
    id = journal.begin(action, begun, TRAIN)
    journal.end(id, action, "done", error, ended, POLICY, TRAIN)


def lose_and_replace(journal: Journal, at: float = 100.0) -> None:
    carry_out(journal, SetDown("a-1", GONE, heard_at=at - 1.4), at, at + 0.2)
    carry_out(journal, Repair("a-1", Remedy.REPLACE, GONE), at + 1, at + 5)
    carry_out(journal, Return("a-1"), at + 29, at + 31)


def test_every_series_is_present_before_anything_happened(path: Path, journal: Journal):
    found = samples(metrics(path).collect())
    assert found['dalsegno_recovery_events_total{kind="replace",stage="failed"}'] == 0
    assert found['dalsegno_recovery_events_total{kind="turn",stage="suspected"}'] == 0
    assert found['dalsegno_recovery_nodes{phase="in_service"}'] == 5
    assert found['dalsegno_recovery_nodes{phase="needs_admin"}'] == 0
    assert found['dalsegno_recovery_spares{state="ready"}'] == found['dalsegno_recovery_spares{state="lent"}'] == 0
    assert found['dalsegno_recovery_held_back{reason="hour"}'] == 0
    assert found["dalsegno_recovery_paused"] == found["dalsegno_recovery_replacements_failed_total"] == 0
    assert found["dalsegno_recovery_detect_seconds_count"] == found["dalsegno_recovery_replace_seconds_count"] == 0
    assert found['dalsegno_recovery_budget_left{partition="train"}'] == 2


def test_times_of_a_lost_and_replaced_node(path: Path, journal: Journal):
    lose_and_replace(journal)
    found = samples(metrics(path).collect())
    assert found["dalsegno_recovery_detect_seconds_sum"] == pytest.approx(1.4)
    assert found["dalsegno_recovery_drain_seconds_sum"] == pytest.approx(0.2)
    assert found["dalsegno_recovery_replace_seconds_sum"] == pytest.approx(30.0)
    assert found['dalsegno_recovery_replace_seconds_bucket{le="30"}'] == 1
    assert found['dalsegno_recovery_events_total{kind="setdown",stage="done"}'] == 1
    assert found['dalsegno_recovery_events_total{kind="replace",stage="begun"}'] == 1


def test_each_cycle_counts_only_new_rows_and_a_restart_counts_all(path: Path, journal: Journal):
    source = metrics(path)
    source.collect()
    lose_and_replace(journal)
    first = samples(source.collect())
    assert samples(source.collect()) == first
    lose_and_replace(journal, at=500.0)
    twice = samples(source.collect())
    assert twice["dalsegno_recovery_detect_seconds_count"] == 2
    assert samples(metrics(path).collect()) == twice


def test_an_action_is_counted_when_it_has_ended(path: Path, journal: Journal):
    source, action = metrics(path), Drain("a-1", replace(GONE, gone=False))
    id = journal.begin(action, 100.0, TRAIN)
    assert samples(source.collect())["dalsegno_recovery_drain_seconds_count"] == 0
    carry_out(journal, Drain("a-2", GONE), 101.0, 101.5)
    assert samples(source.collect())["dalsegno_recovery_drain_seconds_count"] == 1
    journal.end(id, action, "drained", "", 103.0, POLICY, TRAIN)
    found = samples(source.collect())
    assert found["dalsegno_recovery_drain_seconds_count"] == 2
    assert found["dalsegno_recovery_drain_seconds_sum"] == pytest.approx(3.5)


def test_a_fault_is_remembered_for_a_day_after_its_repair(path: Path, journal: Journal):
    xid = NodeFault("xid", Remedy.REBOOT, "fell off the bus", "79")
    carry_out(journal, Drain("a-2", xid), 100.0, 101.0)
    carry_out(journal, Repair("a-2", Remedy.REBOOT, xid), 101.0, 104.0)
    carry_out(journal, Return("a-2"), 104.0, 105.0)
    carry_out(journal, SetDown("a-1", GONE), 900.0, 900.1, error="slurmctld does not answer")
    name = "dalsegno_recovery_last_fault_timestamp_seconds"
    found = samples(metrics(path).collect())
    assert found[f'{name}{{node="a-2",check="xid",code="79"}}'] == 100.0
    assert found[f'{name}{{node="a-1",check="gone",code=""}}'] == 900.0
    later = samples(metrics(path, now=100.0 + 86400.0).collect())
    assert [each for each in later if name in each] == [f'{name}{{node="a-1",check="gone",code=""}}']


def test_a_notice_of_the_cloud_is_shown_with_its_deadline_and_without_a_label_for_each_time(
    path: Path, journal: Journal
):
    text = "the cloud provider ends this instance"
    notice = NodeFault("cloud-notice", Remedy.DRAIN, text, "spot:2026-11-18T12:02:00Z")
    carry_out(journal, Drain("a-2", notice), 100.0, 101.0)
    found = samples(metrics(path).collect())
    last = "dalsegno_recovery_last_fault_timestamp_seconds"
    assert found[f'{last}{{node="a-2",check="cloud-notice",code="spot"}}'] == 100.0
    deadline = "dalsegno_recovery_notice_deadline_timestamp_seconds"
    assert found[f'{deadline}{{node="a-2",kind="spot"}}'] == 1795003320.0


def test_retries_of_a_drain_count_once_from_the_first_attempt():
    times = RecoveryTimes()
    times.add(FinishedAction(SetDown("a", GONE, heard_at=8.0), 10.0, 11.0, failed=True))
    times.add(FinishedAction(SetDown("a", GONE, heard_at=8.0), 13.0, 14.0))
    assert (times.drain.total, times.drain.sum, times.detect.sum) == (1, 4.0, 2.0)
    times.add(FinishedAction(Drain("a", GONE), 20.0, 21.0, failed=True))
    times.add(FinishedAction(Drain("a", GONE), 2000.0, 2001.0))  # a drain for another fault
    assert (times.drain.total, times.drain.sum) == (2, 5.0)


def test_a_replacement_that_an_administrator_ended_does_not_count_for_the_next_fault():
    times = RecoveryTimes()
    times.add(FinishedAction(Repair("a", Remedy.REPLACE, GONE), 10.0, 11.0))
    times.add(FinishedAction(Drain("a", GONE), 5000.0, 5001.0))
    times.add(FinishedAction(Return("a"), 5010.0, 5011.0))
    assert times.replace.total == 0
    times.add(FinishedAction(Repair("a", Remedy.REBOOT, GONE), 6000.0, 6001.0))
    times.add(FinishedAction(Hold("a"), 6010.0, 6011.0))
    assert times.replace.total == 0


def test_a_clock_that_was_set_back_gives_no_negative_time():
    times = RecoveryTimes()
    times.add(FinishedAction(SetDown("a", GONE, heard_at=50.0), 10.0, 9.0))
    assert (times.drain.sum, times.detect.sum) == (0.0, 0.0)


def test_budget_spares_and_held_back_actions(path: Path, journal: Journal):
    carry_out(journal, SetDown("a-1", GONE), 990.0, 990.1)
    journal.record_change(ChangePhase("s-1", NodePhase.SPARE, "is a spare"), 991.0)
    journal.record_change(Note("a-2", "too many", held_back=HeldAction.OUT), 992.0)
    journal.pause(True, "root", 993.0)
    found = samples(metrics(path).collect())
    assert found['dalsegno_recovery_budget_left{partition="train"}'] == 1
    assert found['dalsegno_recovery_nodes{phase="down"}'] == 1
    assert found['dalsegno_recovery_spares{state="ready"}'] == 1
    assert found['dalsegno_recovery_held_back{reason="out"}'] == 1
    assert found["dalsegno_recovery_paused"] == 1


def test_failed_replacements_are_counted(path: Path, journal: Journal):
    carry_out(journal, Repair("a-1", Remedy.REPLACE, GONE), 100.0, 101.0, error="no capacity")
    found = samples(metrics(path).collect())
    assert found["dalsegno_recovery_replacements_failed_total"] == 1
    assert found['dalsegno_recovery_events_total{kind="replace",stage="failed"}'] == 1


def test_rows_of_another_version_are_skipped(path: Path, journal: Journal):
    lose_and_replace(journal)
    journal.db.execute("UPDATE actions SET body = '{}' WHERE kind = 'SetDown'")
    journal.db.execute("INSERT INTO events (at, node, kind, text, stage) VALUES (1, 'a-1', 'new', '', 'newer')")
    source = metrics(path)
    found = samples(source.collect())
    assert source.skipped_rows == 1 and found["dalsegno_recovery_detect_seconds_count"] == 0
    assert found['dalsegno_recovery_events_total{kind="unknown",stage="info"}'] == 1


def test_a_missing_or_damaged_journal_is_an_error_until_it_is_back(path: Path, tmp_path: Path):
    source = metrics(path)
    with pytest.raises(DalsegnoError):
        source.collect()
    assert not path.exists()
    journal = Journal(path)
    lose_and_replace(journal)
    assert samples(source.collect())["dalsegno_recovery_detect_seconds_count"] == 1
    journal.close()
    path.rename(tmp_path / "old")
    Journal(path).close()
    assert samples(source.collect())["dalsegno_recovery_detect_seconds_count"] == 0
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(DalsegnoError):
        metrics(path).collect()


def test_the_source_never_writes_to_the_journal(path: Path, journal: Journal):
    source = metrics(path)
    source.collect()
    db = source._journal._db
    assert db is not None
    with pytest.raises(sqlite3.OperationalError):
        db.execute("DELETE FROM events")
