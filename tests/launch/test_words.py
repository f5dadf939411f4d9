"""What agents say, as events."""

import pytest

from dalsegno.launch.agent.frames import Message
from dalsegno.launch.causes import Kind, read_failure
from dalsegno.launch.events import Event, Joined, Left, Stopped, StoreOpened, WorkerEnded
from dalsegno.launch.words import read_word, still_runs

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/ada/t.py", line 1, in <module>\nValueError: x'


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ({"ready": {"warm": True}}, Joined("n1")),
        ({"cold": "its warm parent was killed"}, Left("n1")),
        ({"store": 3, "port": 4321}, StoreOpened("n1", 3, 4321)),
        ({"stopped": 3}, Stopped("n1", 3)),
        ({"ended": {"generation": 3, "rank": 1, "code": 0}}, WorkerEnded("n1", 3, 1, 0, None, 5.0)),
        ({"step": 7, "generation": 3}, None),
        ({"grant": 1, "generation": 3}, None),
        ({"note": "hello"}, None),
        ({}, None),
    ],
)
def test_a_message_means_an_event_or_none(message: Message, event: Event | None):
    assert read_word("n1", message, age_s=5.0) == event


def test_an_end_that_was_not_well_brings_its_evidence():
    report = {"generation": 2, "rank": 1, "code": -9, "traceback": TRACEBACK, "oom": True, "why": "gone"}
    event = read_word("n1", {"ended": report}, 1.0)
    assert isinstance(event, WorkerEnded)
    assert event.failure == read_failure(1, "n1", -9, TRACEBACK, oom=True, why="gone")
    assert event.failure.kind is Kind.OOM


def test_saved_is_no_failure():
    event = read_word("n1", {"ended": {"generation": 2, "rank": 1, "code": 75}}, 1.0)
    assert event == WorkerEnded("n1", 2, 1, 75, None, 1.0)


def test_what_stopped_workers_had_already_told_comes_along():
    message = {"stopped": 2, "reports": [{"generation": 2, "rank": 1, "code": 1, "traceback": TRACEBACK}]}
    assert read_word("n1", message, 1.0) == Stopped("n1", 2, (read_failure(1, "n1", 1, TRACEBACK),))


@pytest.mark.parametrize(
    ("hello", "runs"),
    [
        ({"generation": 4, "stopped": 3}, True),
        ({"generation": 3, "stopped": 3}, False),  # the order was lost with the coordinator that gave it
        ({"generation": 0, "stopped": 0}, False),  # another agent has taken the place of the one that was there
        ({"generation": 4, "stopped": 4}, False),  # it ended them while nobody was there
    ],
)
def test_an_agent_that_comes_back_still_has_its_workers_or_has_not(hello: Message, runs: bool):
    assert still_runs(hello, generation=4) is runs
