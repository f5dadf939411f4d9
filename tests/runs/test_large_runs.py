"""How the cost of thousands of agents is kept low: combined writes, fewer heartbeats and fewer step reports."""

from __future__ import annotations

import asyncio
import time

from dalsegno.runs.agent.link import INTERVAL_S
from dalsegno.runs.agent.step_reports import REPORT_EVERY_S
from dalsegno.runs.coordinator.agents.liveness import Timing, beat_interval_s, report_interval_s
from dalsegno.runs.coordinator.background import SHARE, PacedAction


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


def test_agents_of_small_runs_send_ten_heartbeats_a_second():
    assert beat_interval_s(1000, Timing()) == INTERVAL_S


def test_agents_of_large_runs_send_fewer_heartbeats_but_three_before_they_count_as_silent():
    assert beat_interval_s(2048, Timing()) > 2 * INTERVAL_S
    for nodes in (4096, 100_000):
        for timing in (Timing(), Timing(gone_s=600)):
            assert 3 * beat_interval_s(nodes, timing) <= timing.limits.silent_s + 1e-9


def test_short_timeout_keeps_the_usual_interval():
    assert beat_interval_s(4096, Timing(gone_s=1.0)) == max(INTERVAL_S, Timing(gone_s=1.0).limits.silent_s / 3)


def test_nodes_of_large_runs_report_fewer_steps():
    assert report_interval_s(256) == REPORT_EVERY_S
    for nodes in (4096, 10_000):
        assert nodes / report_interval_s(nodes) <= 2000
