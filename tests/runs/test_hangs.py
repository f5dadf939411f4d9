"""Detection of hangs and of idle ranks."""

import asyncio
from pathlib import Path

import pytest

from dalsegno.runs.coordinator.agents.activity import Activity, AskTurns, ask_interval_s, describe_work
from dalsegno.runs.coordinator.agents.hangs import (
    ALL_IDLE_S,
    ENOUGH_STEPS,
    HangVerdict,
    HangWatch,
    Idle,
    StepMarks,
    judge_progress,
)
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


def test_limit_is_derived_from_the_last_hundred_steps():
    slow, fast = [20.0 * number for number in range(52)], [1020.0 + 10.0 * number for number in range(1, 51)]
    marks = stepping(StepMarks(None, 0.0), *slow, *fast)
    assert marks.limit_s() == 150.0, "50 steps of 20 s and 50 of 10 s"


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


# The verdict on a generation, from its steps, its output and its work


@pytest.mark.parametrize(
    ("output_at", "work_at", "verdict"),
    [
        (0.0, 0.0, HangVerdict.HANG),
        (70.0, 0.0, HangVerdict.PROGRESS),
        (0.0, 70.0, HangVerdict.SILENT_WORK),
        (69.9, 69.9, HangVerdict.HANG),
    ],
)
def test_script_without_steps_hangs_without_output_and_work(output_at: float, work_at: float, verdict: HangVerdict):
    assert judge_progress(StepMarks(30.0, 0.0), output_at, work_at, 100.0) is verdict
    assert judge_progress(StepMarks(30.0, 0.0), output_at, work_at, 30.0) is HangVerdict.PROGRESS, "the limit applies"


@pytest.mark.parametrize("timeout_s", [30.0, None])
def test_script_with_steps_hangs_without_steps_even_at_work(timeout_s: float | None):
    marks = stepping(StepMarks(timeout_s, 0.0), *range(10))
    assert judge_progress(marks, 100.0, 100.0, 100.0) is HangVerdict.HANG
    assert judge_progress(marks, 0.0, 0.0, 30.0) is HangVerdict.PROGRESS


@pytest.mark.parametrize("steps", [0, ENOUGH_STEPS - 1])
def test_without_a_limit_idle_ranks_are_reported_and_not_ended(steps: int):
    marks, late = stepping(StepMarks(None, 0.0), *range(steps)), ALL_IDLE_S + 10.0
    assert judge_progress(marks, 0.0, 0.0, late) is HangVerdict.ALL_IDLE
    assert judge_progress(marks, 20.0, 0.0, late) is HangVerdict.PROGRESS, "it writes"
    assert judge_progress(marks, 0.0, 20.0, late) is HangVerdict.PROGRESS, "it works"
    assert judge_progress(StepMarks(0, 0.0), 0.0, 0.0, late) is HangVerdict.PROGRESS, "switched off"


def test_ranks_that_are_idle_after_the_last_step_are_reported():
    marks = stepping(StepMarks(5.0, 0.0), *range(10))
    marks.stop_timer()
    assert judge_progress(marks, 0.0, 0.0, 1000.0) is HangVerdict.ALL_IDLE


# The activity of ranks


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


def test_small_transfers_over_a_long_time_are_no_work():
    """A monitoring thread may read a few kilobytes per second."""
    activity = Activity()
    for now in range(0, 1000, 5):
        activity.record(0, WorkerActivity(0.0, now * 4096), now)
    assert activity.idle_s([0], 1000.0) == 1000.0


def test_unknown_rank_is_not_idle():
    assert Activity().idle_s([0], 1e6) == 0.0 and Activity().idle_s([], 1e6) == 0.0


def test_last_work_of_any_rank_is_known():
    activity = Activity()
    assert activity.newest == 0.0
    for now in range(10, 100, 5):
        activity.record(0, WorkerActivity(0.0, 0), now)
        activity.record(1, WorkerActivity(min(now, 40) * 0.5, 0), now)
    assert activity.newest == 40 and activity.idle_ranks([0, 1, 2], 30.0) == [0, 2]


def last_work(*reports: WorkerActivity) -> float:
    """Return when a rank with these reports, one every ten seconds from second 0 on, last worked."""
    activity = Activity()
    for number, report in enumerate(reports):
        activity.record(0, report, 10.0 * number)
    return activity.newest


def test_traffic_of_gpu_memory_is_work_without_cpu_time():
    assert last_work(*[WorkerActivity(1.0, 0, 100, 3)] * 4) == 30.0
    assert last_work(*[WorkerActivity(1.0, 0, 100, 0)] * 4) == 0.0


def test_cpu_time_is_no_work_while_the_gpu_spins():
    """A collective of NCCL that waits keeps its GPU and a core busy, but does not touch the GPU's memory."""
    waiting = [WorkerActivity(10.0 * number, 0, 100, 0) for number in range(4)]
    assert last_work(*waiting) == 0.0
    assert last_work(*waiting, WorkerActivity(30.1, 0)) == 0.0, "nor is its CPU time work afterwards"
    assert last_work(*waiting, WorkerActivity(40.0, 0)) == 40.0, "but CPU time without a kernel is"
    assert last_work(*waiting, WorkerActivity(40.0, 4 << 20, 100, 0)) == 40.0, "and so is I/O"


@pytest.mark.parametrize("gpu", [(), (40, 0), (100, 1)], ids=["unknown", "short kernels", "traffic"])
def test_cpu_time_is_work_unless_the_gpu_spins(gpu: tuple[int, ...]):
    assert last_work(*(WorkerActivity(10.0 * number, 0, *gpu) for number in range(4))) == 30.0


@pytest.mark.parametrize(
    ("limit_s", "agents", "interval_s"),
    [(600.0, 2, 30.0), (600.0, 4096, 40.96), (60.0, 2, 5.0), (5.0, 2, 1.25), (30.0, 10_000, 7.5)],
)
def test_agents_are_queried_less_often_in_large_runs_but_four_times_within_the_limit(
    limit_s: float, agents: int, interval_s: float
):
    assert ask_interval_s(limit_s, agents) == interval_s


def test_queries_are_spread_over_the_interval():
    agents, turns = [str(number) for number in range(128)], AskTurns(0.0)
    checks = [turns.due(agents, 16.0, 0.5 * check) for check in range(1, 65)]
    assert {len(asked) for asked in checks} == {4}, "all at once would keep the coordinator busy"
    assert [agent for asked in checks for agent in asked] == agents * 2
    assert sorted(turns.due(agents, 16.0, 1000.0), key=int) == agents, "after a pause, each is asked once"


def test_work_and_idle_ranks_are_named():
    assert describe_work(4, {}) == "all 4 ranks are at work"
    assert describe_work(3, {2: "n3"}) == "3 of 4 ranks are at work; rank 2 on n3 is idle"
    many = {rank: f"n{rank}" for rank in range(1, 8)}
    assert describe_work(1, many) == (
        "1 of 8 ranks is at work; ranks 1 on n1, 2 on n2, 3 on n3, 4 on n4 and 3 more are idle"
    )


def test_idle_ranks_are_described():
    everyone = Idle(1, 0, {"0": "n1", "1": "n2"}, 600, "/stacks")
    assert everyone.sentence() == "no step and no output, and all 2 ranks have been idle for 600 s; see /stacks"
    others = Idle(1, 1, {"1": "n2"}, 30, "/stacks")
    assert others.sentence() == (
        "1 rank has returned, but rank 1 on n2 has not, and has done nothing for 30 s; see /stacks"
    )


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
