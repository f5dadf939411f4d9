"""Liveness of agents: silence, a probe, a verdict."""

from collections.abc import Callable

import pytest

from dalsegno.runs.coordinator.liveness import Liveness, LivenessLook, Timing

TIMING = Timing(gone_s=2.0, stuck_s=30.0, look_s=0.1)


def watching(timing: Timing = TIMING) -> Liveness:
    liveness = Liveness(timing)
    liveness.watch("a", 0.0)
    return liveness


def looks(
    liveness: Liveness, until: float, before: Callable[[float], None] = lambda now: None
) -> list[tuple[float, LivenessLook]]:
    """Check ten times a second; return the checks with a result."""
    every = [round(0.1 * number, 1) for number in range(1, round(until * 10) + 1)]
    seen = []
    for now in every:
        before(now)
        look = liveness.look(now)
        if look != LivenessLook():
            seen.append((now, look))
    return seen


def test_beating_agent_is_not_probed():
    liveness = watching()
    assert looks(liveness, 60.0, lambda now: liveness.beat("a", now)) == []


def test_silence_leads_to_a_probe_then_a_verdict():
    seen = looks(watching(), 5.0)
    assert [now for now, _ in seen] == [0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]
    assert all(look == LivenessLook(probe=("a",)) for _, look in seen[:-1])
    assert seen[-1][1] == LivenessLook(gone=(("a", "the host has not answered for 1.6 s"),))


def test_verdict_is_given_once():
    assert sum(bool(look.gone) for _, look in looks(watching(), 30.0)) == 1


@pytest.mark.parametrize("gone_s", [0.7, 1.0, 1.5, 3.0, 5.0, 30.0])
def test_verdict_comes_within_the_timeout(gone_s: float):
    now, look = looks(watching(Timing(gone_s=gone_s)), gone_s)[-1]
    assert look.gone and 0.8 * gone_s <= now <= gone_s


def test_host_that_answers_probes_is_alive():
    liveness = watching()

    def answer(now: float) -> None:
        if now >= 0.9:
            liveness.answered("a", now)

    assert not any(look.gone for _, look in looks(liveness, 29.0, answer))


def test_agent_silent_for_very_long_is_stuck():
    liveness = watching()
    seen = looks(liveness, 31.0, lambda now: liveness.answered("a", now))
    assert seen == [(30.0, LivenessLook(gone=(("a", "the agent has been silent for 30 s, though the host answers"),)))]


def test_lost_beats_for_a_third_of_a_second_are_tolerated():
    liveness = watching()

    def beat(now: float) -> None:
        if not 1.0 < now <= 1.3:
            liveness.beat("a", now)

    assert looks(liveness, 3.0, beat) == []


def test_agent_stopped_for_three_seconds_on_a_live_host_is_not_lost():
    liveness = watching()

    def live(now: float) -> None:
        if 1.0 < now <= 4.0:
            if now >= 1.9:
                liveness.answered("a", now)
        else:
            liveness.beat("a", now)

    seen = looks(liveness, 8.0, live)
    assert not any(look.gone for _, look in seen) and {now for now, _ in seen} <= {1.8, 1.9}


def test_timers_restart_after_a_pause_of_the_coordinator():
    liveness = watching()
    liveness.look(0.1)
    assert liveness.look(9.0) == LivenessLook(), "the coordinator slept, not the agents"
    assert liveness.look(9.1) == LivenessLook()
    assert any(look.gone for look in looks_from(liveness, 9.2, 10.8)), "one period later the usual timeout applies"


def looks_from(liveness: Liveness, start: float, end: float) -> list[LivenessLook]:
    return [liveness.look(start + 0.1 * number) for number in range(round((end - start) * 10) + 1)]


def test_messages_of_unknown_agents_are_ignored():
    liveness = Liveness(TIMING)
    liveness.beat("stranger", 1.0)
    liveness.answered("stranger", 1.0)
    assert looks(liveness, 5.0) == []


def test_forgotten_agent_gets_no_verdict():
    liveness = watching()
    liveness.forget("a")
    liveness.forget("a")
    assert looks(liveness, 5.0) == []


def test_timers_are_per_agent():
    liveness = watching()
    liveness.watch("b", 0.0)
    seen = looks(liveness, 2.0, lambda now: liveness.beat("b", now))
    assert seen[-1] == (1.6, LivenessLook(gone=(("a", "the host has not answered for 1.6 s"),)))
