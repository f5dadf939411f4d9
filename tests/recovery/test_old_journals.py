"""Tests that journals of earlier versions can be read."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from dalsegno.recovery.decisions.actions import ChangePhase, Note, Release
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import Subject, Topic
from dalsegno.recovery.journal.event import Event, EventKind, EventStage, read_event
from dalsegno.recovery.journal.store import Journal
from dalsegno.spec.facts import facts_from_json, facts_to_json

OLD = """
CREATE TABLE nodes (node TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE marks (id INTEGER PRIMARY KEY, at REAL NOT NULL, body TEXT NOT NULL);
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, node TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL);
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "recovery.sqlite"
    db = sqlite3.connect(path)
    db.executescript(OLD)
    bodies = (
        {"node": "n1", "phase": "mending", "said": "its agent is silent", "steps": ["reboot"]},
        {"node": "n2", "phase": "given up", "said": "reboots did not help"},
    )
    db.executemany("INSERT INTO nodes VALUES (?, ?)", [(body["node"], json.dumps(body)) for body in bodies])
    db.execute("INSERT INTO marks (at, body) VALUES (5, ?)", (json.dumps({"kind": "taken", "node": "n1", "at": 5.0}),))
    db.execute("INSERT INTO events (at, node, kind, text) VALUES (5, 'n1', 'release', 'is released for job 12')")
    db.commit()
    db.close()
    return path


def test_old_names_of_phases_are_read(old: Path):
    store = Journal(old)
    node = store.records.get("n1")
    assert (node.phase, node.about) == (NodePhase.REPAIRING, Subject()) and store.records.marks[0].at == 5.0
    assert store.records.get("n2").phase is NodePhase.NEEDS_ADMIN
    assert store.records.get("n2").said == "reboots did not help"
    store.close()


def test_old_events_are_read_and_new_ones_are_added(old: Path):
    store = Journal(old)
    store.record_change(Note("n1", "job 13 is over", settles=(13,)), 6.0)
    first, second = store.events()
    assert first == Event(1, 5.0, "n1", EventKind.RELEASE, "is released for job 12", EventStage.INFO, (12,))
    assert (second.kind, second.jobs) == (EventKind.NOTE, (13,))
    store.close()
    again = Journal(old)
    assert again.events() == [first, second]
    again.close()


def test_an_action_with_an_old_name_of_a_phase_is_read():
    action = ChangePhase("n1", NodePhase.NEEDS_ADMIN, "reboots did not help")
    written = {**facts_to_json(action), "to": "given up"}
    assert facts_from_json(ChangePhase, written) == action


def test_answers_of_other_versions_are_read():
    event = {"id": 3, "at": 5.0, "node": "n1", "kind": "someday", "text": "job 7 runs again on n2"}
    assert read_event(event) == Event(3, 5.0, "n1", EventKind.UNKNOWN, str(event["text"]), EventStage.INFO, (7,))
    assert [NodePhase.parse(value) for value in ("mending", "given up", "someday", None)] == [
        NodePhase.REPAIRING,
        NodePhase.NEEDS_ADMIN,
        NodePhase.UNKNOWN,
        NodePhase.UNKNOWN,
    ]
    assert Topic(None) is Topic("someday") is Topic.OTHER


def test_an_event_survives_encoding(tmp_path: Path):
    store = Journal(tmp_path / "recovery.sqlite")
    action = Release("n1", 12, "1000:train")
    id = store.begin(action, 1.0)
    store.end(id, action, "", "Slurm does not answer", 2.0, Policy(), ())
    (event,) = store.events()
    assert (event.stage, event.jobs) == (EventStage.FAILED, (12,))
    assert read_event(event.message()) == event
    store.close()
