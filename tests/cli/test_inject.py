"""Injected faults are written to the cluster's journal, where `events` and `why` find them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.cli.health.inject import RecordedInjections
from dalsegno.inject.faults import FAULTS, FaultOptions
from dalsegno.recovery.journal.event import Event, EventKind, EventStage
from dalsegno.recovery.journal.store import Journal
from dalsegno.why.node import read_controller_view
from tests.cli.test_drill_traces import Bench


def events(path: Path) -> list[Event]:
    journal = Journal(path)
    try:
        return journal.events()
    finally:
        journal.close()


def test_injected_and_undone_faults_are_events_with_who_did_it(tmp_path: Path):
    target = RecordedInjections(Bench(), tmp_path / "journal.db", "ada")
    target.inject(FAULTS["xid"], "n1", FaultOptions(code=79, for_s=2.5))
    target.clear("n1")
    found = events(tmp_path / "journal.db")
    assert [event.text for event in found] == ["fault xid 79 injected for 2.5 s by ada", "fault xid undone by ada"]
    assert {(event.node, event.kind, event.stage) for event in found} == {("n1", EventKind.REQUEST, EventStage.DONE)}
    answer = {"events": [event.message() for event in found]}
    assert [moment.who for moment in read_controller_view(answer).moments] == ["person", "person"]


def test_fault_is_injected_even_if_the_journal_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bench = Bench()
    RecordedInjections(bench, tmp_path / "missing/journal.db", "ada").inject(FAULTS["xid"], "n1", FaultOptions(code=79))
    assert [fault.fault for fault in bench.injected()] == ["xid"]
    assert "not in the cluster's journal" in capsys.readouterr().err
