"""Tests of the decision what to do with a coordinator that is not running."""

import pytest

from dalsegno.recovery.runs.coordinators import (
    CoordinatorTask,
    RestartStep,
    RunRecord,
    on_controller_start,
    on_coordinator_end,
    on_request,
)

LIVING = RunRecord("/home/ada/runs/r1", 1001, pid=7, start=99)
GONE = RunRecord("/home/ada/runs/r1", 1001)
ADA = RunRecord("/home/ada/runs/r1", 1001)


def with_short_lives(count: int, *, given_up: bool = False) -> RunRecord:
    return RunRecord("/home/ada/runs/r1", 1001, short_lives=count, given_up=given_up)


@pytest.mark.parametrize("code", [0])
def test_a_coordinator_whose_run_is_over_is_not_restarted(code: int):
    assert on_coordinator_end(LIVING, code, lived_s=0.1) == RestartStep(CoordinatorTask.FORGET, GONE)


@pytest.mark.parametrize("code", [-9, -15, 64, 255])
def test_a_killed_or_crashed_coordinator_is_restarted_at_once(code: int):
    assert on_coordinator_end(LIVING, code, lived_s=60.0) == RestartStep(CoordinatorTask.START, GONE)
    assert on_coordinator_end(LIVING, code, lived_s=0.1) == RestartStep(CoordinatorTask.START, with_short_lives(1))


def test_a_coordinator_with_an_unknown_exit_code_is_restarted():
    assert on_coordinator_end(LIVING, None, lived_s=60.0) == RestartStep(CoordinatorTask.START, GONE)


def test_early_ends_lead_to_longer_delays_and_then_to_no_restart():
    record, pauses = GONE, []
    while (step := on_coordinator_end(record, 70, lived_s=1.0)).do is CoordinatorTask.START:
        record = step.record
        pauses.append(step.after_s)
    assert pauses == [0, 1, 2, 4, 8, 16, 30]
    assert step == RestartStep(CoordinatorTask.GIVE_UP, with_short_lives(8, given_up=True))


def test_a_long_life_resets_the_count_of_early_ends():
    assert on_coordinator_end(with_short_lives(7), 70, lived_s=10.0) == RestartStep(
        CoordinatorTask.START, with_short_lives(0)
    )


def test_a_new_controller_watches_restarts_or_leaves_coordinators():
    assert on_controller_start(LIVING, lives=True) == RestartStep(CoordinatorTask.WATCH, LIVING)
    assert on_controller_start(LIVING, lives=False) == RestartStep(CoordinatorTask.START, GONE)
    given_up = with_short_lives(8, given_up=True)
    assert on_controller_start(given_up, lives=False) == RestartStep(CoordinatorTask.LEAVE, given_up)


def test_requesting_a_known_run_changes_nothing():
    assert on_request(ADA, None) == RestartStep(CoordinatorTask.START, ADA)
    assert on_request(ADA, LIVING) == RestartStep(CoordinatorTask.LEAVE, LIVING)


def test_requesting_an_abandoned_run_restarts_it():
    assert on_request(ADA, with_short_lives(8, given_up=True)) == RestartStep(CoordinatorTask.START, GONE)


def test_a_run_id_of_another_run_is_refused():
    assert on_request(RunRecord("/home/bob/runs/r1", 1002), LIVING) is None
    assert on_request(RunRecord("/home/ada/other/r1", 1001), LIVING) is None
    assert on_request(RunRecord("/home/bob/runs/r1", 1002), with_short_lives(8, given_up=True)) is None
