"""The step reports and busy times of a node's workers, as the agent sends them to the coordinator."""

from __future__ import annotations

from typing import Any

import pytest

from dalsegno.runs.agent.step_reports import BUSY_EVERY_S, MAX_WORKERS, BusyTimes, StepReports


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
def test_value_that_is_not_a_time_is_ignored(message: dict[str, Any]):
    times = BusyTimes()
    times.note(message)
    assert times.take(10.0) == {}


def test_a_script_cannot_fill_the_memory_of_its_agent():
    times = BusyTimes()
    for rank in range(MAX_WORKERS + 5):
        times.note({"rank": rank, "busy_s": 1.0})
    assert len(times.take(10.0)["busy"]) == MAX_WORKERS


def test_reports_of_all_ranks_are_joined_to_one_message():
    reports = StepReports()
    sent = [reports.join({"rank": rank, "busy_s": 0.5}, 7, 1, 10.0 + rank / 100) for rank in range(8)]
    assert sent[0] == {"step": 7, "generation": 1, "progress": None, "over": None, "busy": {"0": 0.5}}
    assert sent[1:] == [None] * 7
    later = reports.join({"rank": 0, "busy_s": 0.25}, 9, 1, 11.5)
    assert later is not None and later["step"] == 9
    assert later["busy"] == {"0": 0.25, **{str(rank): 0.5 for rank in range(1, 8)}}


def test_no_report_of_a_worker_that_reports_twice_a_second_is_dropped():
    reports = StepReports()
    assert all(reports.join({"rank": 0}, step, 1, 0.5 * step) for step in range(1, 20))


@pytest.mark.parametrize("field", ["progress", "over"])
def test_progress_and_the_end_of_the_steps_are_sent_at_once(field: str):
    reports = StepReports()
    reports.interval_s = 60.0
    assert reports.join({"rank": 1}, 1, 1, 10.0)
    assert reports.join({"rank": 2}, 2, 1, 10.1) is None
    found = reports.join({"rank": 0, field: {"loss": 1.0}}, 2, 1, 10.2)
    assert found is not None and found[field] == {"loss": 1.0}


def test_first_step_of_a_generation_is_sent_at_once():
    reports = StepReports()
    reports.interval_s = 60.0
    assert reports.join({"rank": 1}, 1, 1, 10.0)
    assert reports.join({"rank": 1}, 1, 2, 10.1)
    assert reports.join({"rank": 1}, 2, 2, 10.2) is None
