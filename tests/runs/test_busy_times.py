"""The busy times of a node's workers, as the agent hands them to the coordinator."""

from __future__ import annotations

from typing import Any

import pytest

from dalsegno.runs.agent.worker_socket import BUSY_EVERY_S, MAX_WORKERS, BusyTimes


def test_busy_times_of_all_ranks_are_sent_together_once_a_second():
    times = BusyTimes()
    assert times.take(0.0) == {}
    times.note({"step": 1, "rank": 8, "busy_s": 0.25})
    assert times.take(10.0) == {"busy": {"8": 0.25}}
    times.note({"rank": 8, "busy_s": 0.5})
    times.note({"rank": 9, "busy_s": 0.75})
    assert times.take(10.0 + BUSY_EVERY_S / 2) == {}
    assert times.take(10.0 + BUSY_EVERY_S) == {"busy": {"8": 0.5, "9": 0.75}}
    assert times.take(99.0) == {}


@pytest.mark.parametrize(
    "message",
    [{}, {"rank": 1}, {"rank": [], "busy_s": 1.0}, {"rank": 1, "busy_s": float("nan")}, {"rank": 1, "busy_s": -1.0},
     {"rank": 1, "busy_s": "x"}, {"rank": 1, "busy_s": 10**400}],
)  # fmt: skip
def test_what_is_not_a_time_is_ignored(message: dict[str, Any]):
    times = BusyTimes()
    times.note(message)
    assert times.take(10.0) == {}


def test_a_script_cannot_fill_the_memory_of_its_agent():
    times = BusyTimes()
    for rank in range(MAX_WORKERS + 5):
        times.note({"rank": rank, "busy_s": 1.0})
    assert len(times.take(10.0)["busy"]) == MAX_WORKERS
