"""The schedule of snapshots, saves and stops, which is the same on every rank."""

from __future__ import annotations

from dalsegno.train.options import Auto, Never, Seconds, Steps
from dalsegno.train.schedule import RETRY_S, DueActions, Leader, due, next_common_step


def test_intervals_in_steps_need_no_rank_store() -> None:
    dues = [due(step, Steps(2), Steps(3), {}) for step in range(1, 7)]
    assert [each.memory for each in dues] == [False, True, False, True, False, True]
    assert [each.disk for each in dues] == [False, False, True, False, False, True]


def test_nothing_is_due_by_time_without_a_store_entry() -> None:
    assert due(5, Auto(), Seconds(10), {}) == DueActions()


def test_store_entry_applies_from_its_step_on() -> None:
    agreed = {"memory": [10, 4], "disk": 12}
    assert [step for step in range(20) if due(step, Auto(), Seconds(9), agreed).memory] == [10, 14, 18]
    assert [step for step in range(20) if due(step, Auto(), Seconds(9), agreed).disk] == [12]


def test_stop_saves_to_memory_and_disk() -> None:
    assert due(7, Never(), Never(), {"stop": 7}) == DueActions(memory=True, disk=True, stop=True)
    assert due(6, Never(), Never(), {"stop": 7}) == DueActions()


def test_stop_request_during_the_last_step_is_ignored() -> None:
    assert due(8, Never(), Never(), {"stop": 7}, last=8) == DueActions(), "the run is complete"
    assert due(8, Never(), Never(), {"stop": 7}, last=9).stop


def test_rank_past_the_stop_step_still_stops() -> None:
    assert due(9, Never(), Never(), {"stop": 7}).stop


def test_next_common_step_is_after_every_rank_has_read_the_store() -> None:
    assert next_common_step(100, step_s=0.05) == 111
    assert next_common_step(100, step_s=10.0) == 102
    assert next_common_step(100, step_s=10.0, world=1) == 100, "a single rank stops at once"


def test_leader_turns_a_time_into_a_step() -> None:
    leader = Leader(Never(), Seconds(60), now=0.0)
    assert leader.decide(10, 59.0, 1.0, None) == {}
    assert leader.decide(11, 60.5, 1.0, None, ahead=13) == {"disk": 13}
    assert leader.decide(12, 61.5, 1.0, None, ahead=14) == {}
    assert leader.decide(71, 120.5, 1.0, None, ahead=73) == {"disk": 73}


def test_announced_save_is_not_postponed_by_the_next() -> None:
    leader = Leader(Never(), Seconds(10), now=0.0)  # shorter than a step of 12 s
    announced = [leader.decide(step, 12.0 * step, 12.0, None, ahead=step + 2).get("disk") for step in range(1, 8)]
    assert announced == [3, None, None, 6, None, None, 9]


def test_next_save_waits_for_the_running_one() -> None:
    leader = Leader(Never(), Seconds(10), now=0.0)
    assert leader.decide(10, 10.0, 1.0, None, ahead=12) == {"disk": 12}
    assert leader.decide(19, 19.0, 1.0, None, ahead=21, busy=True) == {} and not leader.behind
    assert leader.decide(25, 25.0, 1.0, None, ahead=27, busy=True) == {} and leader.behind
    assert leader.decide(26, 26.0, 1.0, None, ahead=28) == {"disk": 28}


def test_auto_starts_with_every_step_and_follows_the_cost() -> None:
    leader = Leader(Auto(), Never(), now=0.0)
    assert leader.decide(1, 0.1, 0.1, None, ahead=7) == {"memory": [7, 1]}
    assert leader.decide(10, 1.0, 0.1, 0.005, ahead=16) == {"memory": [16, 5]}
    assert leader.decide(20, 2.0, 0.1, 0.0055, ahead=26) == {}, "noise"
    assert leader.decide(30, 3.0, 0.1, 0.02, ahead=36) == {"memory": [36, 20]}


def test_failed_save_is_retried_before_the_interval_ends() -> None:
    leader = Leader(Never(), Seconds(3600), now=0.0)
    assert leader.decide(10, 100.0, 1.0, None, failed=9) == {}
    assert leader.decide(40, 100.0 + RETRY_S, 1.0, None, failed=9, ahead=42) == {"disk": 42}
    assert leader.decide(70, 100.0 + 2 * RETRY_S, 1.0, None, failed=9) == {}, "the retry succeeded"
    assert leader.decide(71, 101.0 + 2 * RETRY_S, 1.0, None, failed=70) == {}
    assert leader.decide(110, 102.0 + 3 * RETRY_S, 1.0, None, failed=70, ahead=112) == {"disk": 112}


def test_failed_save_by_steps_is_retried() -> None:
    leader = Leader(Never(), Steps(100), now=0.0)
    assert leader.decide(100, 10.0, 1.0, None, failed=100) == {}
    assert leader.decide(130, 10.0 + RETRY_S, 1.0, None, failed=100, ahead=132) == {"disk": 132}
