"""Every second of a run is accounted for once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.runs.coordinator.agents.messages import Stepped
from dalsegno.runs.coordinator.generations.events import AgentJoined, GenerationStopped, StoreOpened, WorkerEnded
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run, advance
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.reports.goodput import (
    Goodput,
    ProgressWriter,
    TimeKind,
    add_time,
    record_change,
    record_failure,
    record_grant,
    record_start,
    record_step,
    record_wait,
)


def test_run_without_failures_is_fully_accounted() -> None:
    account = record_start(Goodput(at=0.0), 10.0)
    account = record_step(account, 13.0, 1, saving_s=0.0)
    account = record_step(account, 113.0, 100, saving_s=1.0)
    assert account.spent == {
        TimeKind.WAITING: 10.0,
        TimeKind.STARTING: 3.0,
        TimeKind.PRODUCTIVE: 99.0,
        TimeKind.CHECKPOINTS: 1.0,
    }
    assert account.share == pytest.approx(99 / 113)


def test_failure_costs_unfinished_work_the_restart_and_repeated_steps() -> None:
    account = record_step(record_start(Goodput(at=0.0), 0.0), 5.0, 1, 0.0)
    account = record_step(account, 15.0, 11, 0.0)
    account = record_start(record_failure(account, 15.5), 15.6)  # killed half a second into a step
    account = record_step(account, 17.0, 10, 0.0)  # resumes from step 9
    account = record_step(account, 18.0, 11, 0.0)
    account = record_step(account, 19.0, 12, 0.0)
    assert account.spent == pytest.approx(
        {TimeKind.WAITING: 0.0, TimeKind.STARTING: 5.0, TimeKind.PRODUCTIVE: 11.0, TimeKind.LOST: 3.0}
    )
    assert account.failures == 1


def test_time_without_nodes_counts_as_waiting() -> None:
    account = record_step(record_start(Goodput(at=0.0), 0.0), 1.0, 1, 0.0)
    account = record_start(record_wait(record_failure(account, 2.0), 2.5), 62.5)
    account = record_step(account, 64.0, 2, 0.0)
    assert account.spent == pytest.approx({TimeKind.WAITING: 60.0, TimeKind.STARTING: 2.5, TimeKind.LOST: 1.5})


def test_time_after_the_grant_counts_as_starting() -> None:
    """Agents that import torch on granted nodes are starting, not queued."""
    account = record_start(record_grant(record_grant(Goodput(at=0.0), 2.0), 5.0), 12.0)
    account = record_step(account, 13.0, 1, 0.0)
    assert account.spent == pytest.approx({TimeKind.WAITING: 2.0, TimeKind.STARTING: 11.0})
    again = record_grant(record_wait(record_failure(account, 14.0), 14.0), 15.0)
    assert again.kind == TimeKind.WAITING, "later it waits for lost nodes"


def test_snapshots_during_repeated_steps_count_as_lost() -> None:
    account = record_step(record_start(Goodput(at=0.0, furthest=50), 0.0), 1.0, 10, 0.0)
    account = record_step(account, 2.0, 11, saving_s=0.5)
    assert account.spent == {TimeKind.WAITING: 0.0, TimeKind.STARTING: 1.0, TimeKind.LOST: 1.0}


DEEDS = st.tuples(
    st.sampled_from(["start", "wait", "fail", "step", "pass"]), st.floats(0, 100), st.integers(0, 50), st.floats(0, 9)
)


@given(st.lists(DEEDS, max_size=40))
def test_kinds_always_add_up_to_the_total(deeds: list[tuple[str, float, int, float]]) -> None:
    account, now = Goodput(at=0.0), 0.0
    for what, seconds, step, saving_s in deeds:
        now += seconds
        if what == "step":
            account = record_step(account, now, step, saving_s)
        else:
            account = {"start": record_start, "wait": record_wait, "fail": record_failure, "pass": add_time}[what](
                account, now
            )
    assert sum(account.spent.values()) == pytest.approx(account.at, abs=1e-6)
    assert all(seconds >= -1e-9 for seconds in account.spent.values())


def test_clock_that_goes_back_removes_no_time() -> None:
    account = record_step(record_start(Goodput(at=100.0), 100.0), 110.0, 1, 0.0)
    account = record_step(account, 50.0, 2, 0.0)
    assert account.spent == {TimeKind.WAITING: 0.0, TimeKind.STARTING: 10.0, TimeKind.PRODUCTIVE: 0.0}


# Following a run

SHAPE = Shape(2, 2, 1)


def life(*events: object) -> list[Run]:
    """Return the run after each of these events; agents answer orders at once."""
    runs = [Run(SHAPE)]
    for event in events:
        runs.append(advance(runs[-1], event)[0])  # type: ignore[arg-type]
    return runs


def test_account_follows_the_phases_of_a_run() -> None:
    runs = life(
        AgentJoined("a"),
        AgentJoined("b"),
        StoreOpened("a", 1, 1),
        WorkerEnded("a", 1, 0, -9),
        GenerationStopped("a", 1),
    )
    account, now = Goodput(at=0.0), 0.0
    for before, after in pairwise(runs):
        now += 1.0
        account = record_change(account, before, after, now)
    assert account.kind == TimeKind.LOST
    assert account.failures == 1
    assert account.spent == {TimeKind.WAITING: 2.0, TimeKind.STARTING: 1.0, TimeKind.LOST: 1.0}


def test_growing_back_is_lost_time_but_not_a_failure() -> None:
    runs = life(AgentJoined("a"), AgentJoined("b"), StoreOpened("a", 1, 1))
    grown = replace(runs[-1], phase=GenerationPhase.STOPPING)
    account = record_change(record_step(record_start(Goodput(at=0.0), 0.0), 1.0, 1, 0.0), runs[-1], grown, 2.0)
    assert (account.failures, account.spent[TimeKind.LOST]) == (0, 1.0)


def test_successor_continues_the_account(tmp_path: Path) -> None:
    pen = ProgressWriter(tmp_path / "progress.json")
    pen.record_step(Stepped(1, 7, {"saving_s": 0.5, "loss": 2.0}))
    pen.write(last=True)
    after = ProgressWriter(tmp_path / "progress.json").progress
    assert (after.step, after.figures["loss"]) == (7, 2.0)
    (tmp_path / "progress.json").write_text("{")
    assert ProgressWriter(tmp_path / "progress.json").progress.step == 0
