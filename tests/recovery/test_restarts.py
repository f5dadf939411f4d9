"""What becomes of a coordinator that is not running: values in, values out."""

import pytest

from dalsegno.recovery.coordinators import (
    Do,
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
def test_one_that_says_its_run_is_over_is_forgotten(code: int):
    assert on_coordinator_end(LIVING, code, lived_s=0.1) == RestartStep(Do.FORGET, GONE)


@pytest.mark.parametrize("code", [-9, -15, 64, 255])
def test_one_that_was_killed_or_crashed_is_started_at_once(code: int):
    assert on_coordinator_end(LIVING, code, lived_s=60.0) == RestartStep(Do.START, GONE)
    assert on_coordinator_end(LIVING, code, lived_s=0.1) == RestartStep(Do.START, with_short_lives(1))


def test_how_one_that_was_taken_over_ended_no_one_knows_so_it_is_started_again():
    assert on_coordinator_end(LIVING, None, lived_s=60.0) == RestartStep(Do.START, GONE)


def test_short_lives_are_followed_by_longer_and_longer_pauses_and_then_by_giving_up():
    record, pauses = GONE, []
    while (step := on_coordinator_end(record, 70, lived_s=1.0)).do is Do.START:
        record = step.record
        pauses.append(step.after_s)
    assert pauses == [0, 1, 2, 4, 8, 16, 30]
    assert step == RestartStep(Do.GIVE_UP, with_short_lives(8, given_up=True))


def test_a_long_life_makes_up_for_the_short_ones_before():
    assert on_coordinator_end(with_short_lives(7), 70, lived_s=10.0) == RestartStep(Do.START, with_short_lives(0))


def test_a_new_controller_watches_what_lives_starts_what_is_gone_and_leaves_what_was_given_up():
    assert on_controller_start(LIVING, lives=True) == RestartStep(Do.WATCH, LIVING)
    assert on_controller_start(LIVING, lives=False) == RestartStep(Do.START, GONE)
    given_up = with_short_lives(8, given_up=True)
    assert on_controller_start(given_up, lives=False) == RestartStep(Do.LEAVE, given_up)


def test_a_run_that_is_asked_for_again_stays_as_it_is():
    assert on_request(ADA, None) == RestartStep(Do.START, ADA)
    assert on_request(ADA, LIVING) == RestartStep(Do.LEAVE, LIVING)


def test_a_run_that_was_given_up_is_tried_again_when_asked_for():
    assert on_request(ADA, with_short_lives(8, given_up=True)) == RestartStep(Do.START, GONE)


def test_an_id_that_another_run_has_is_refused():
    assert on_request(RunRecord("/home/bob/runs/r1", 1002), LIVING) is None
    assert on_request(RunRecord("/home/ada/other/r1", 1001), LIVING) is None
    assert on_request(RunRecord("/home/bob/runs/r1", 1002), with_short_lives(8, given_up=True)) is None
