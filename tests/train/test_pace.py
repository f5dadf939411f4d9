"""When a run takes snapshots, saves and stops; the same on every rank."""

from __future__ import annotations

from dalsegno.train.options import Auto, Never, Seconds, Steps
from dalsegno.train.schedule import RETRY_S, Due, Leader, due, soon


def test_steps_are_counted_by_every_rank_for_itself() -> None:
    days = [due(step, Steps(2), Steps(3), {}) for step in range(1, 7)]
    assert [day.memory for day in days] == [False, True, False, True, False, True]
    assert [day.disk for day in days] == [False, False, True, False, False, True]


def test_without_a_word_nothing_is_due_by_time() -> None:
    assert due(5, Auto(), Seconds(10), {}) == Due()


def test_a_word_counts_from_its_step_on() -> None:
    words = {"memory": [10, 4], "disk": 12}
    assert [step for step in range(20) if due(step, Auto(), Seconds(9), words).memory] == [10, 14, 18]
    assert [step for step in range(20) if due(step, Auto(), Seconds(9), words).disk] == [12]


def test_stopping_saves_everything() -> None:
    assert due(7, Never(), Never(), {"stop": 7}) == Due(memory=True, disk=True, stop=True)
    assert due(6, Never(), Never(), {"stop": 7}) == Due()


def test_who_is_asked_to_stop_during_the_last_step_is_done() -> None:
    assert due(8, Never(), Never(), {"stop": 7}, last=8) == Due(), "nobody need start it again for nothing"
    assert due(8, Never(), Never(), {"stop": 7}, last=9).stop


def test_a_rank_that_has_missed_the_step_stops_all_the_same() -> None:
    assert due(9, Never(), Never(), {"stop": 7}).stop


def test_soon_is_after_every_rank_has_looked() -> None:
    assert soon(100, step_s=0.05) == 111
    assert soon(100, step_s=10.0) == 102
    assert soon(100, step_s=10.0, world=1) == 100, "a rank alone stops at once"


def test_the_leader_turns_a_time_into_a_step() -> None:
    leader = Leader(Never(), Seconds(60), now=0.0)
    assert leader.words(10, 59.0, 1.0, None) == {}
    assert leader.words(11, 60.5, 1.0, None, ahead=13) == {"disk": 13}
    assert leader.words(12, 61.5, 1.0, None, ahead=14) == {}
    assert leader.words(71, 120.5, 1.0, None, ahead=73) == {"disk": 73}


def test_a_save_that_was_announced_is_not_put_off_by_the_next() -> None:
    leader = Leader(Never(), Seconds(10), now=0.0)  # shorter than a step of 12 s
    announced = [leader.words(step, 12.0 * step, 12.0, None, ahead=step + 2).get("disk") for step in range(1, 8)]
    assert announced == [3, None, None, 6, None, None, 9]


def test_the_next_save_waits_for_the_one_under_way() -> None:
    leader = Leader(Never(), Seconds(10), now=0.0)
    assert leader.words(10, 10.0, 1.0, None, ahead=12) == {"disk": 12}
    assert leader.words(19, 19.0, 1.0, None, ahead=21, busy=True) == {} and not leader.behind
    assert leader.words(25, 25.0, 1.0, None, ahead=27, busy=True) == {} and leader.behind
    assert leader.words(26, 26.0, 1.0, None, ahead=28) == {"disk": 28}


def test_auto_begins_with_every_step_and_follows_the_cost() -> None:
    leader = Leader(Auto(), Never(), now=0.0)
    assert leader.words(1, 0.1, 0.1, None, ahead=7) == {"memory": [7, 1]}
    assert leader.words(10, 1.0, 0.1, 0.005, ahead=16) == {"memory": [16, 5]}
    assert leader.words(20, 2.0, 0.1, 0.0055, ahead=26) == {}, "wavering"
    assert leader.words(30, 3.0, 0.1, 0.02, ahead=36) == {"memory": [36, 20]}


def test_a_failed_save_is_tried_again_before_its_time() -> None:
    leader = Leader(Never(), Seconds(3600), now=0.0)
    assert leader.words(10, 100.0, 1.0, None, failed=9) == {}
    assert leader.words(40, 100.0 + RETRY_S, 1.0, None, failed=9, ahead=42) == {"disk": 42}
    assert leader.words(70, 100.0 + 2 * RETRY_S, 1.0, None, failed=9) == {}, "it went well this time"
    assert leader.words(71, 101.0 + 2 * RETRY_S, 1.0, None, failed=70) == {}
    assert leader.words(110, 102.0 + 3 * RETRY_S, 1.0, None, failed=70, ahead=112) == {"disk": 112}


def test_failures_of_saves_by_steps_are_tried_again_too() -> None:
    leader = Leader(Never(), Steps(100), now=0.0)
    assert leader.words(100, 10.0, 1.0, None, failed=100) == {}
    assert leader.words(130, 10.0 + RETRY_S, 1.0, None, failed=100, ahead=132) == {"disk": 132}
