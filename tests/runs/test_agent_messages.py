"""Parsing of agents' messages."""

import pytest

from dalsegno.runs.coordinator.agents.messages import (
    UNREADABLE,
    AgentHello,
    AgentMessage,
    AllStopped,
    Broken,
    EndedWorker,
    GrantRequested,
    LogPiece,
    NodeActivity,
    NoticeRead,
    ParentDied,
    Ready,
    Signalled,
    StacksTaken,
    Stepped,
    StoreOpen,
    UserNote,
    WorkerActivity,
    WorkerReport,
    WorkersResumed,
    read_hello,
    read_message,
)
from dalsegno.wire.cloud_notice import CloudNotice, NoticeKind
from dalsegno.wire.frames import Message

REPORT = {"generation": 3, "rank": 1, "code": -9, "traceback": "ValueError: x", "oom": True, "at": 1.5}


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"ready": {"warm": True, "seconds": 1.5, "threads": ["a"]}}, Ready(True, 1.5, ("a",))),
        ({"ready": {"warm": False, "seconds": None, "threads": None}}, Ready()),
        ({"cold": "gone"}, ParentDied("gone")),
        ({"broken": "no folder"}, Broken("no folder")),
        ({"store": 3, "port": 4321}, StoreOpen(3, 4321)),
        ({"ended": REPORT}, EndedWorker(WorkerReport(3, 1, -9, "ValueError: x", oom=True))),
        ({"ended": {"generation": 3, "rank": 1, "code": 0}}, EndedWorker(WorkerReport(3, 1, 0))),
        ({"stopped": 3, "reports": [REPORT]}, AllStopped(3, (WorkerReport(3, 1, -9, "ValueError: x", oom=True),))),
        ({"stopped": 3}, AllStopped(3)),
        ({"step": 7, "generation": 3}, Stepped(3, 7)),
        ({"step": 7, "generation": None}, Stepped(0, 7)),
        ({"grant": 1, "generation": 3}, GrantRequested(1, 3)),
        ({"stacks": 3}, StacksTaken(3)),
        ({"step": 9, "generation": 2, "over": True}, Stepped(2, 9, over=True)),
        ({"step": 9, "generation": 2, "busy": {"4": 0.5}}, Stepped(2, 9, busy_s={4: 0.5})),
        ({"worked": 3, "ranks": {"4": [1.5, 7]}}, NodeActivity(3, {4: WorkerActivity(1.5, 7)})),
        ({"worked": 3, "ranks": {"4": [1.5, 7, 99, 0]}}, NodeActivity(3, {4: WorkerActivity(1.5, 7, 99, 0)})),
        ({"signal": "SIGTERM"}, Signalled("SIGTERM")),
        ({"notice": "spot:2026-11-18T12:02:00Z"}, NoticeRead(CloudNotice(NoticeKind.SPOT, 1795003320.0))),
        ({"notice": "of a later version"}, NoticeRead(None)),
        ({"note": "hello"}, UserNote("hello")),
        ({"resumed": 600, "source": "disk", "generation": 2}, WorkersResumed(2, 600, from_memory=False)),
        ({"resumed": 678, "source": "memory", "generation": 2}, WorkersResumed(2, 678, from_memory=True)),
        (
            {"log": "logs/g1/rank0.log", "text": "x", "at": 7, "stream": "n1"},
            LogPiece("logs/g1/rank0.log", "x", 7, "n1"),
        ),
        ({"beat": True}, None),
        ({}, None),
    ],
)
def test_every_message_is_parsed(message: Message, word: AgentMessage | None):
    assert read_message(message) == word


UNREADABLE_MESSAGES = [
    {"ended": "yes"},
    {"store": 1},
    {"ready": 1},
    {"step": [], "generation": 1},
    {"worked": 1, "ranks": {"0": [1]}},
]


@pytest.mark.parametrize("message", UNREADABLE_MESSAGES)
def test_unreadable_message_is_an_error(message: Message):
    with pytest.raises(UNREADABLE):
        read_message(message)


def test_hello_names_the_agent_and_what_it_holds():
    said = {
        "agent": "n1", "probe": 4000, "pid": 17, "job": 7, "address": "", "found": {"A": "b"}, "generation": 3,
        "stopped": 2, "reports": [REPORT], "nonce": "x", "proof": "y", "run": "train-k3f9x",
    }  # fmt: skip
    report = WorkerReport(3, 1, -9, "ValueError: x", oom=True)
    assert read_hello(said) == AgentHello("n1", 4000, 17, 7, "", {"A": "b"}, 3, 2, (report,))
    assert read_hello({"agent": "n1", "probe": 1, "found": {}}) == AgentHello("n1", 1)


@pytest.mark.parametrize(
    ("generation", "stopped", "runs"),
    [
        (4, 3, True),
        (3, 3, False),  # the order was lost with the coordinator
        (0, 0, False),  # another agent has replaced the first
        (4, 4, False),  # the agent ended them while it had no coordinator
    ],
)
def test_returning_agent_reports_whether_its_workers_run(generation: int, stopped: int, runs: bool):
    assert AgentHello("n1", 1, generation=generation, stopped=stopped).still_runs(4) is runs
