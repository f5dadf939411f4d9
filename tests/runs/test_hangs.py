"""Detection of hangs and of idle ranks."""

from dalsegno.runs.coordinator.agents.hangs import ENOUGH_STEPS, Activity, StepMarks
from dalsegno.runs.coordinator.agents.messages import WorkerActivity


def stepping(marks: StepMarks, *times: float, first: int = 0) -> StepMarks:
    for number, now in enumerate(times, first):
        marks.step(number, now)
    return marks


def test_no_hang_without_reported_steps():
    assert StepMarks(None, 0.0).overdue_s(1e6) is None


def test_first_steps_may_take_any_time():
    marks = stepping(StepMarks(None, 0.0), *(60.0 * number for number in range(ENOUGH_STEPS)))
    assert marks.limit_s() is None and marks.overdue_s(1e6) is None


def test_ten_times_the_median_step_is_a_hang():
    marks = stepping(StepMarks(None, 0.0), 0.0, 600.0, 620.0, 640.0, 660.0, 680.0)
    assert marks.limit_s() == 200.0
    assert marks.overdue_s(880.0) is None and marks.overdue_s(881.0) == 201.0


def test_short_steps_have_a_limit_of_a_minute():
    marks = stepping(StepMarks(None, 0.0), *(0.1 * number for number in range(20)))
    assert marks.limit_s() == 60.0


def test_limit_of_the_user_applies_from_the_start():
    marks = StepMarks(30.0, 100.0)
    assert marks.overdue_s(130.0) is None and marks.overdue_s(131.0) == 31.0


def test_limit_of_zero_disables_hang_detection():
    assert stepping(StepMarks(0, 0.0), *range(50)).overdue_s(1e9) is None


def test_the_first_step_of_a_generation_is_known():
    marks = StepMarks(None, 0.0)
    assert [marks.step(number, 1.0) for number in (40, 40, 41)] == [True, False, False]


def test_first_rank_to_reach_a_step_counts():
    marks = StepMarks(30.0, 0.0)
    stepping(marks, 10.0, 20.0)
    marks.step(1, 25.0)
    marks.step(0, 26.0)
    assert marks.last == 20.0


def test_output_counts_as_progress_only_without_steps():
    marks = StepMarks(30.0, 0.0)
    marks.record_output(20.0)
    assert marks.overdue_s(45.0) is None
    marks.record_output(10.0)
    assert marks.last == 20.0, "older output changes nothing"
    stepping(marks, 21.0, 22.0)
    marks.record_output(50.0)
    assert marks.overdue_s(53.0) == 31.0, "a growing log is not a step"


def test_old_steps_are_forgotten():
    times = [1000.0 * number for number in range(10)] + [9000.0 + number for number in range(1, 300)]
    assert stepping(StepMarks(None, 0.0), *times).limit_s() == 60.0


def test_after_the_last_step_nothing_is_a_hang() -> None:
    for timeout_s in (None, 5.0):
        marks = StepMarks(timeout_s, 0.0)
        for number in range(10):
            marks.step(number, float(number))
        assert marks.overdue_s(1000.0) is not None
        marks.stop_timer()
        assert marks.overdue_s(1000.0) is None


def test_idle_time_starts_with_the_last_activity_of_any_rank():
    activity = Activity()
    for now in range(0, 100, 5):
        activity.record(0, WorkerActivity(3.0, 0), now)
        activity.record(1, WorkerActivity(min(now, 40) * 0.5, 0), now)  # half of a processor, until second 40
    assert activity.idle_s([0], 95.0) == 95.0 and activity.idle_s([0, 1], 95.0) == 55.0


def test_waiting_threads_are_idle_but_a_slow_upload_is_not():
    activity = Activity()
    for now in range(0, 100, 5):
        activity.record(0, WorkerActivity(now * 0.005, 0), now)
        activity.record(1, WorkerActivity(0.0, now * (1 << 20)), now)
    assert activity.idle_s([0], 95.0) == 95.0 and activity.idle_s([1], 95.0) == 0.0


def test_unknown_rank_is_not_idle():
    assert Activity().idle_s([0], 1e6) == 0.0 and Activity().idle_s([], 1e6) == 0.0
