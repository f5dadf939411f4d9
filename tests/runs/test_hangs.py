"""Detection of hangs and of idle ranks."""

import asyncio
from pathlib import Path

import pytest

from dalsegno.runs.coordinator.agents.hangs import ENOUGH_STEPS, Activity, HangWatch, StepMarks
from dalsegno.runs.coordinator.agents.messages import WorkerActivity
from dalsegno.runs.coordinator.generations.causes import read_failure
from dalsegno.runs.coordinator.generations.events import AgentJoined, Event, StoreOpened, WorkerEnded
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run, advance
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.folder import RunFolder


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


# Collectives that time out before the run counts as hung

GLOO = "RuntimeError: [pair.cc:553] Timed out waiting 1800000ms for recv operation to complete"


class PlayedControl:
    """A run on two nodes whose agents capture stacks at once, and what was ordered and applied, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.present, self.done = RunFolder(folder), frozenset("ab"), list[str]()
        self.run, self.watch, self.tasks = Run(Shape(2, 2, 1)), HangWatch(self, 0.0), list[object]()  # type: ignore[arg-type]
        for event in (AgentJoined("a"), AgentJoined("b"), StoreOpened("a", 1, 5000)):
            self.run, _ = advance(self.run, event)
        self.watch.generation_started()

    def send(self, agent: str, message: dict[str, object]) -> None:
        self.done.append(f"{next(iter(message))} {agent}")
        asyncio.get_running_loop().call_soon(self.watch.stacks_done, agent)

    def apply(self, event: Event) -> None:
        assert isinstance(event, WorkerEnded)
        self.done.append(f"rank {event.rank} ended")

    def run_in_background(self, work: object) -> None:
        self.tasks.append(work)


def ended(rank: int, code: int, traceback: str = "", generation: int = 1) -> WorkerEnded:
    failure = read_failure(rank, "a", code, traceback)
    return WorkerEnded("a", generation, rank, code, failure)


@pytest.mark.parametrize("first", [ended(0, 1, GLOO), ended(0, -6)], ids=["gloo", "NCCL's watchdog"])
def test_stacks_are_captured_before_a_timeout_of_a_collective_ends_the_generation(tmp_path: Path, first: WorkerEnded):
    async def main() -> list[str]:
        control = PlayedControl(tmp_path)
        assert control.watch.defer(first)
        assert control.watch.defer(ended(1, 1, GLOO)), "the end of another rank waits, too"
        await asyncio.gather(*control.tasks)  # type: ignore[call-overload]
        assert not control.watch.defer(ended(1, -9)), "later ends are applied at once"
        return control.done

    assert sorted(done := asyncio.run(main())) == ["rank 0 ended", "rank 1 ended", "stacks a", "stacks b"]
    assert done[2:] == ["rank 0 ended", "rank 1 ended"]


def test_other_failures_end_the_generation_at_once(tmp_path: Path):
    watch = PlayedControl(tmp_path).watch
    for event in (ended(0, -9), ended(0, 1, "ValueError: no"), ended(0, 1, GLOO, generation=7), AgentJoined("c")):
        assert not watch.defer(event)


def test_failure_while_the_generation_is_stopped_is_applied_at_once(tmp_path: Path):
    control = PlayedControl(tmp_path)
    control.run = Run(Shape(2, 2, 1), phase=GenerationPhase.STOPPING, generation=1)
    assert not control.watch.defer(ended(0, 1, GLOO))
