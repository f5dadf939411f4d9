"""Liveness of run agents: the limits of a coordinator, its probes, and what it reports."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from dalsegno.runs.coordinator.agents.liveness import AgentLiveness, Timing

TIMING = Timing(gone_s=2.0, stuck_s=30.0)
KEY = b"s" * 32
Lost = list[tuple[str, str]]


class Played:
    """A coordinator whose clock the test sets. No host answers its probes, which are counted."""

    def __init__(self, timing: Timing = TIMING, *agents: str) -> None:
        self.now, self.probed = 0.0, list[tuple[float, str]]()
        self.pulse = AgentLiveness(timing, self._probe, lambda: self.now)
        for agent in agents or ("a",):
            self.pulse.expect(agent, KEY)

    def _probe(self, agent: str) -> None:
        self.probed.append((self.now, agent))

    def looks(self, until: float, before: Callable[[float], None] = lambda now: None) -> list[tuple[float, Lost]]:
        """Check ten times a second. Return the checks that found lost agents."""
        seen = []
        for number in range(round(self.now * 10) + 1, round(until * 10) + 1):
            self.now = round(0.1 * number, 1)
            before(self.now)
            if lost := self.pulse.look():
                seen.append((self.now, lost))
        return seen


@contextmanager
def played(timing: Timing = TIMING, *agents: str) -> Iterator[Played]:
    one = Played(timing, *agents)
    yield one
    one.pulse.close()


def test_agent_that_sends_messages_is_not_probed():
    with played() as run:
        assert run.looks(60.0, lambda now: run.pulse.record_message("a")) == [] and run.probed == []


def test_silence_leads_to_probes_then_a_verdict():
    with played() as run:
        assert run.looks(5.0) == [(1.6, [("a", "the host has not answered for 1.6 s")])]
        assert run.probed == [(now, "a") for now in (0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5)]


def test_verdict_is_given_once():
    with played() as run:
        assert len(run.looks(30.0)) == 1


@pytest.mark.parametrize("gone_s", [0.7, 1.0, 1.5, 3.0, 5.0, 30.0, 60.0, 600.0])
def test_verdict_comes_within_the_timeout(gone_s: float):
    with played(Timing(gone_s=gone_s)) as run:
        ((now, lost),) = run.looks(gone_s)
        assert lost and 0.8 * gone_s <= now <= gone_s


def test_lost_beats_for_a_third_of_a_second_are_tolerated():
    with played() as run:

        def beat(now: float) -> None:
            if not 1.0 < now <= 1.3:
                run.pulse.record_message("a")

        assert run.looks(3.0, beat) == [] and run.probed == []


def test_message_ends_a_probe():
    with played() as run:

        def beat(now: float) -> None:
            if now == 1.0:
                run.pulse.record_message("a")

        assert run.looks(2.4, beat) == []
        assert run.probed == [(now, "a") for now in (0.8, 0.9, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4)]


def test_timers_restart_after_a_pause_of_the_coordinator():
    with played() as run:
        assert run.looks(1.2) == []
        run.now = 9.0
        assert run.pulse.look() == [], "the coordinator slept, not the agents"
        before = len(run.probed)
        assert run.looks(9.7) == [] and len(run.probed) == before
        ((now, _),) = run.looks(11.0)
        assert now == pytest.approx(10.6, abs=0.11), "one period later the usual timeout applies"


def test_messages_of_unknown_agents_are_ignored():
    with played() as run:
        run.pulse.forget("a")
        run.pulse.record_message("stranger")
        assert run.looks(5.0) == [] and run.probed == []


def test_forgotten_agent_gets_no_verdict():
    with played() as run:
        run.looks(1.0)
        run.pulse.forget("a")
        run.pulse.forget("a")
        assert run.looks(5.0) == []


def test_timers_are_per_agent():
    with played(TIMING, "a", "b") as run:
        seen = run.looks(2.0, lambda now: run.pulse.record_message("b"))
        assert seen == [(1.6, [("a", "the host has not answered for 1.6 s")])]


# With real connections


@pytest.mark.parametrize("silent, dials", [(1, 3), (16, 3), (17, 1)])
def test_silent_host_is_dialled_several_times_at_once_unless_many_are_silent(silent: int, dials: int):
    async def count() -> list[int]:
        agents = [f"n{number}" for number in range(silent)]
        with played(TIMING, *agents) as run:
            run.pulse._probes = lambda agent: ("127.0.0.1", 9)
            run.now = 0.8
            run.pulse.look()
            return [len(probe.dials) for probe in run.pulse._probing.values()]

    assert asyncio.run(count()) == [dials] * silent


async def first_loss(timing: Timing, address: tuple[str, int], most_s: float) -> tuple[float, str] | None:
    """Return when and why an agent that never sends anything is lost."""
    pulse, lost = AgentLiveness(timing, lambda agent: address), asyncio.get_running_loop().create_future()
    pulse.open(0, "127.0.0.1")
    began = time.monotonic()
    pulse.expect("a", KEY)
    watch = asyncio.ensure_future(pulse.watch(lambda agent, why: lost.set_result((time.monotonic() - began, why))))
    done, _ = await asyncio.wait([lost], timeout=most_s)
    watch.cancel()
    pulse.close()
    return lost.result() if done else None


@pytest.mark.waits
def test_agent_silent_for_very_long_on_a_live_host_is_stuck():
    with socket.create_server(("127.0.0.1", 0)) as host:
        found = asyncio.run(first_loss(Timing(gone_s=2.0, stuck_s=3.0), host.getsockname(), 60.0))
    assert found is not None and found[0] >= 3.0
    assert re.fullmatch(r"the agent has been silent for \d+ s, though the host answers", found[1])


def test_refused_connection_does_not_count_as_an_answer():
    """The host may have rebooted in the meantime, or its agent may have died."""
    with socket.create_server(("127.0.0.1", 0)) as host:
        closed = host.getsockname()
    found = asyncio.run(first_loss(Timing(gone_s=1.0), closed, 60.0))
    assert found is not None and found[0] >= 0.8 and found[1].startswith("the host has not answered for ")
