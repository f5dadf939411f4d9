"""Tests of limiting the cost of thousands of agents: combined writes, fewer heartbeats and fewer step reports."""

from __future__ import annotations

import asyncio
import time

import pytest

from dalsegno.runs.agent.link import INTERVAL_S
from dalsegno.runs.agent.step_reports import REPORT_EVERY_S
from dalsegno.runs.coordinator.agents.liveness import Timing, beat_interval_s, report_interval_s
from dalsegno.runs.coordinator.background import SHARE, Batch, PacedAction
from dalsegno.runs.coordinator.generations.causes import CauseKind, Failure
from dalsegno.runs.coordinator.generations.events import GenerationStopped, WorkerEnded
from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run, advance, confirm_stops
from dalsegno.runs.coordinator.generations.group import Shape, form_group


def test_requests_that_come_together_run_an_action_once():
    ran: list[float] = []

    async def request() -> None:
        action = PacedAction(lambda: ran.append(time.monotonic()))
        for _ in range(100):
            action.request()
        assert ran == []  # the action does not run within the event that requested it
        await asyncio.sleep(0)

    asyncio.run(request())
    assert len(ran) == 1


def test_costly_action_waits_in_proportion_to_its_cost():
    ran: list[float] = []

    def act() -> None:
        ran.append(time.monotonic())
        until_s = time.thread_time() + 0.005
        while time.thread_time() < until_s:
            pass

    async def request() -> None:
        action = PacedAction(act)
        while len(ran) < 2:
            action.request()
            await asyncio.sleep(0.001)

    asyncio.run(request())
    assert ran[1] - ran[0] >= 0.005 / SHARE


@pytest.mark.parametrize(
    "seconds, at_once, later, done",
    [
        (0.0, True, True, "run"),
        (0.0, False, True, "requested"),
        (0.02, True, False, "requested"),
        (0.02, True, True, "dropped"),
    ],
)
def test_action_that_takes_long_is_not_run_at_once(seconds: float, at_once: bool, later: bool, done: str):
    ran = []

    def act() -> None:
        ran.append(1)
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    async def serve() -> str:
        action = PacedAction(act)
        action.run()
        action.serve(at_once, later)
        return "run" if len(ran) == 2 else "requested" if action._pending else "dropped"

    assert asyncio.run(serve()) == done


def test_agents_of_small_runs_send_ten_heartbeats_a_second():
    assert beat_interval_s(1000, Timing()) == INTERVAL_S


def test_agents_of_large_runs_send_fewer_heartbeats_but_three_before_they_count_as_silent():
    assert beat_interval_s(2048, Timing()) > 2 * INTERVAL_S
    for nodes in (4096, 100_000):
        for timing in (Timing(), Timing(gone_s=600)):
            assert 3 * beat_interval_s(nodes, timing) <= timing.limits.silent_s + 1e-9


@pytest.mark.parametrize("gone_s", [0.5, 0.8, 1.0, 1.5])
def test_short_timeout_has_eight_heartbeats_in_the_silence_that_triggers_a_probe(gone_s: float):
    timing = Timing(gone_s=gone_s)
    assert 8 * beat_interval_s(64, timing) == pytest.approx(timing.limits.silent_s)
    assert beat_interval_s(4096, timing) == pytest.approx(timing.limits.silent_s / 3)


def test_nodes_of_large_runs_report_fewer_steps():
    assert report_interval_s(256) == REPORT_EVERY_S
    for nodes in (4096, 10_000):
        assert nodes / report_interval_s(nodes) <= 1000


def test_values_of_one_turn_are_handled_together_and_in_order():
    handled: list[list[int]] = []

    async def add() -> None:
        batch = Batch(handled.append)
        for value in (1, 2, 3):
            batch.add(value)
        assert handled == []
        await asyncio.sleep(0)
        batch.add(4)
        batch.flush()
        await asyncio.sleep(0)

    asyncio.run(add())
    assert handled == [[1, 2, 3], [4]]


def test_stops_confirmed_together_have_the_effect_of_single_ones():
    names = ("a", "b", "c")
    group = form_group(1, Shape(2, 3, 1), names)
    run = Run(Shape(2, 3, 1), 3, phase=GenerationPhase.RUNNING, generation=1, ready=names, group=group)
    failed, late = Failure(0, "a", -9, CauseKind.KILLED), GenerationStopped("b", 0)
    run, _ = advance(run, WorkerEnded("a", 1, 0, -9, failed))
    stops = [late, GenerationStopped("a", 1, (failed,)), GenerationStopped("b", 1), GenerationStopped("c", 1)]
    assert confirm_stops(run, stops[:1]) == (run, [])  # these stops are of an earlier generation
    one_by_one = run
    for stop in stops:
        one_by_one, orders = advance(one_by_one, stop)
    assert confirm_stops(run, stops) == (one_by_one, orders)
    assert one_by_one.phase is GenerationPhase.OPENING
