"""Tests of reading the run's journal and the controller's events."""

from __future__ import annotations

from dalsegno.drill.impacts import DrillMark, DrillMarkKind, describe_run_failures, marks_of_controller, marks_of_run
from dalsegno.recovery.journal.event import Event, EventKind, EventStage
from dalsegno.wire.frames import Message


def event(id: int, kind: EventKind, stage: EventStage) -> Message:
    """Return an event as the controller's socket sends it."""
    return Event(id, float(id), "n1", kind, "for people", stage).message()


def test_lost_nodes_and_failed_ranks_are_marked_but_not_errors_of_peers():
    entries = [
        {"at": 1.0, "event": "began", "host": "head"},
        {"at": 2.0, "event": "generation", "generation": 1, "nodes": ["n1", "n2"]},
        {"at": 3.0, "event": "lost", "node": "n2", "why": "no sign of life"},
        {"at": 3.1, "event": "cold", "node": "n3", "why": "its warm parent was killed"},
        {"at": 4.0, "event": "failed", "node": "n1", "rank": 0, "what": "was killed by SIGKILL"},
        {"at": 4.1, "event": "failed", "node": "n3", "rank": 1, "what": "gloo", "noise": True},
    ]
    assert list(marks_of_run(entries)) == [
        DrillMark(2.0, DrillMarkKind.GENERATION, "", "generation 1 on n1, n2"),
        DrillMark(3.0, DrillMarkKind.KNOWN, "n2", "lost by the run: no sign of life"),
        DrillMark(3.1, DrillMarkKind.KNOWN, "n3", "its warm parent was killed"),
        DrillMark(4.0, DrillMarkKind.KNOWN, "n1", "rank 0 was killed by SIGKILL"),
    ]


def test_only_completed_actions_of_the_controller_count_as_done():
    events = [
        event(1, EventKind.TURN, EventStage.SUSPECTED),
        event(2, EventKind.DRAIN, EventStage.FAILED),
        event(3, EventKind.SET_DOWN, EventStage.DONE),
        event(4, EventKind.REPLACE, EventStage.BEGUN),
        event(5, EventKind.RETURN, EventStage.DONE),
    ]
    assert [(mark.at, mark.kind) for mark in marks_of_controller(events)] == [
        (1.0, DrillMarkKind.KNOWN),
        (2.0, EventKind.DRAIN),
        (3.0, DrillMarkKind.DRAINED),
        (4.0, EventKind.REPLACE),
        (5.0, DrillMarkKind.RETURNED),
    ]


def test_only_a_note_about_a_held_back_fault_marks_it_as_known():
    events = [
        event(1, EventKind.NOTE, EventStage.SUSPECTED),
        event(2, EventKind.NOTE, EventStage.INFO),
    ]
    assert [mark.kind for mark in marks_of_controller(events)] == [DrillMarkKind.KNOWN, EventKind.NOTE]


def test_faults_of_the_undisturbed_run_are_reported():
    formed = [{"at": 1.0, "event": "generation", "generation": 1, "nodes": ["n1"]}]
    failed = {"at": 2.0, "event": "failed", "node": "n1", "rank": 3, "what": "failed: CheckpointError"}
    again = {"at": 3.0, "event": "generation", "generation": 2, "nodes": ["n1"]}
    assert describe_run_failures(formed) == ""
    assert describe_run_failures([*formed, failed]) == "n1: rank 3 failed: CheckpointError"
    assert describe_run_failures([*formed, failed, again]) == (
        "it restarted 1 time, first because of n1: rank 3 failed: CheckpointError"
    )
    assert describe_run_failures([*formed, again]) == "it restarted 1 time"


def test_requests_of_people_are_not_marks():
    assert list(marks_of_controller([event(1, EventKind.REQUEST, EventStage.DONE)])) == []
