"""Events that follow from agents' messages."""

import pytest

from dalsegno.runs.coordinator.agents.messages import (
    AgentMessage,
    AllStopped,
    EndedWorker,
    GrantRequested,
    ParentDied,
    Ready,
    Stepped,
    StoreOpen,
    UserNote,
    WorkerReport,
    to_event,
)
from dalsegno.runs.coordinator.generations.causes import CauseKind, read_failure
from dalsegno.runs.coordinator.generations.events import (
    AgentGone,
    AgentJoined,
    Event,
    GenerationStopped,
    StoreOpened,
    WorkerEnded,
)

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/ada/t.py", line 1, in <module>\nValueError: x'


@pytest.mark.parametrize(
    ("word", "event"),
    [
        (Ready(warm=True), AgentJoined("n1")),
        (ParentDied("its warm parent was killed"), AgentGone("n1")),
        (StoreOpen(3, 4321), StoreOpened("n1", 3, 4321)),
        (AllStopped(3), GenerationStopped("n1", 3)),
        (EndedWorker(WorkerReport(3, 1, 0)), WorkerEnded("n1", 3, 1, 0, None, 5.0)),
        (Stepped(3, 7), None),
        (GrantRequested(1, 3), None),
        (UserNote("hello"), None),
    ],
)
def test_message_maps_to_an_event_or_none(word: AgentMessage, event: Event | None):
    assert to_event("n1", word, age_s=5.0) == event


def test_failure_event_includes_its_evidence():
    event = to_event("n1", EndedWorker(WorkerReport(2, 1, -9, TRACEBACK, oom=True)), 1.0)
    assert isinstance(event, WorkerEnded)
    assert event.failure == read_failure(1, "n1", -9, TRACEBACK, oom=True)
    assert event.failure.kind is CauseKind.OOM


def test_saved_exit_is_not_a_failure():
    assert to_event("n1", EndedWorker(WorkerReport(2, 1, 75)), 1.0) == WorkerEnded("n1", 2, 1, 75, None, 1.0)


def test_errors_of_stopped_workers_are_included():
    word = AllStopped(2, (WorkerReport(2, 1, 1, TRACEBACK),))
    assert to_event("n1", word, 1.0) == GenerationStopped("n1", 2, (read_failure(1, "n1", 1, TRACEBACK),))


def test_failure_on_an_unhealthy_node_is_marked():
    event = to_event("n1", EndedWorker(WorkerReport(2, 1, 1)), 1.0, healthy=False)
    assert isinstance(event, WorkerEnded) and event.failure is not None and not event.failure.healthy
