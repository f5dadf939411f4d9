"""The liveness detector, with the limits of the controller and with those of a coordinator."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dalsegno.recovery.agents.view import NODE_LIMITS
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.wire.liveness import LATE_S, Liveness, LivenessLimits, LivenessLook, Presence
from tests.conftest import LONG

RUN_LIMITS = Timing().limits
WITHIN_S = {NODE_LIMITS: 1.5, RUN_LIMITS: 3.0}  # the time until a host without power is declared lost
A_TICK_S = 1e-9


@pytest.fixture(params=[NODE_LIMITS, RUN_LIMITS], ids=["controller", "coordinator"])
def limits(request: pytest.FixtureRequest) -> LivenessLimits:
    assert isinstance(request.param, LivenessLimits)
    return request.param


class Played:
    """The liveness of `a` and `b` with the test's own clock. The test chooses heartbeats and answers to probes."""

    def __init__(self, limits: LivenessLimits = NODE_LIMITS) -> None:
        self.now, self.limits, self.liveness = 100.0, limits, Liveness(limits)
        self.beat_s = 0.4 * limits.silent_s
        self.beating, self.host, self.service = {"a", "b"}, {"a", "b"}, {"a", "b"}
        self.beats: dict[str, float] = {}
        self.probes: dict[str, float] = {}
        self.probed: list[str] = []
        for peer in ("a", "b"):
            self.liveness.expect(peer, self.now)

    def on(self, seconds: float) -> Played:
        until = self.now + seconds
        while self.now < until - A_TICK_S:
            self.now += self.limits.look_s
            for peer in self.beating:
                if self.now - self.beats.get(peer, 0.0) >= self.beat_s - A_TICK_S:
                    self.beats[peer] = self.now
                    self.liveness.beat(peer, self.now)
            self._end_probes()
            for peer in self.liveness.look(self.now).probe:
                self.probes[peer] = self.now + self.limits.probe_s
                self.probed.append(peer)
        return self

    def _end_probes(self) -> None:
        for peer in list(self.probes):
            host, service = peer in self.host, peer in self.service
            if (host and service) or self.probes[peer] <= self.now + A_TICK_S:
                del self.probes[peer]
                self.liveness.probe_ended(peer, self.now, host=host, service=service)

    def power_off(self, peer: str) -> None:
        for signs in (self.beating, self.host, self.service):
            signs.discard(peer)

    def __getitem__(self, peer: str) -> Presence:
        return self.liveness.signs[peer].presence

    def until(self, peer: str, presence: Presence, at_most_s: float) -> float:
        began = self.now
        while self[peer] is not presence:
            assert self.now - began < at_most_s, f"{peer} is {self[peer]}"
            self.on(self.limits.look_s)
        return self.now - began


# Rules that are the same for both watchers


def test_a_peer_with_heartbeats_is_never_probed(limits: LivenessLimits):
    played = Played(limits).on(60)
    assert played["a"] is played["b"] is Presence.CONNECTED and played.probed == []


def test_a_peer_whose_heartbeats_pause_for_less_than_the_limit_is_not_probed(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.beating.discard("a")
    played.on(0.4 * limits.silent_s)
    played.beating.add("a")
    assert played.on(5)["a"] is Presence.CONNECTED and played.probed == []


def test_a_host_without_power_is_lost_in_time(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.power_off("a")
    least_s = limits.silent_s + limits.probe_s - played.beat_s
    assert played.until("a", Presence.GONE, WITHIN_S[limits]) >= least_s - A_TICK_S
    assert played["b"] is Presence.CONNECTED, "periods are per peer"


def test_a_silent_agent_on_a_live_host_is_declared_dead_not_lost(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.beating.discard("a")
    heard = played.beats["a"]
    played.until("a", Presence.SILENT, limits.silent_s + 2 * limits.look_s)
    played.on(limits.stuck_s - 3)
    assert played["a"] is Presence.SILENT
    played.until("a", Presence.AGENT_DEAD, 4)
    assert 0 <= played.now - heard - limits.stuck_s + A_TICK_S <= 3 * limits.look_s
    played.power_off("a")
    played.until("a", Presence.GONE, WITHIN_S[limits])


def test_an_agent_that_was_stopped_for_a_while_is_connected_again(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.beating.discard("a")
    played.on(limits.stuck_s - 2)
    assert played["a"] is Presence.SILENT
    played.beating.add("a")
    assert played.on(0.1)["a"] is Presence.CONNECTED


def test_an_answer_of_the_service_alone_keeps_a_peer_alive(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.beating.discard("a")
    played.host.discard("a")  # for example because of a firewall
    played.on(5)
    assert played["a"] is Presence.SILENT and played.liveness.signs["a"].service


def test_a_probe_that_could_not_be_sent_proves_nothing(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.power_off("a")
    played.until("a", Presence.SILENT, WITHIN_S[limits])
    played.liveness.probe_ended("a", played.now, host=None)
    assert played["a"] is Presence.SILENT


def test_a_broken_connection_is_probed_at_once(limits: LivenessLimits):
    played = Played(limits).on(5)
    for peer in ("a", "b"):
        played.beating.discard(peer)
        played.liveness.disconnected(peer, played.now)
    played.power_off("b")
    at_once_s = 2 * limits.look_s
    assert played.until("a", Presence.AGENT_DEAD, 0.2) <= at_once_s + A_TICK_S
    assert played.until("b", Presence.GONE, limits.probe_s + at_once_s) <= limits.probe_s + at_once_s


def test_a_returning_agent_is_connected_from_any_state(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.power_off("a")
    played.until("a", Presence.GONE, WITHIN_S[limits])
    played.beating.add("a")
    played.on(0.1)
    assert played["a"] is Presence.CONNECTED


def test_after_a_delay_of_the_watcher_all_periods_start_again(limits: LivenessLimits):
    played = Played(limits).on(5)
    for peer in ("a", "b"):
        played.power_off(peer)
    played.on(limits.silent_s + 0.5 * limits.probe_s)
    played.now += 5  # the watcher was stopped while a probe was in progress
    look = played.liveness.look(played.now)
    assert look == LivenessLook(late=True)
    played.probes.clear()
    played.on(0.8 * limits.silent_s)
    assert played["a"] is played["b"] is Presence.SILENT
    played.beating |= {"b"}
    played.on(0.2 * limits.silent_s + limits.probe_s + 3 * limits.look_s)
    assert (played["a"], played["b"]) == (Presence.GONE, Presence.CONNECTED)


def test_the_result_of_a_probe_from_before_a_delay_is_void(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.power_off("a")
    played.until("a", Presence.SILENT, WITHIN_S[limits])
    played.now += 5
    assert played.liveness.look(played.now).late
    played.liveness.probe_ended("a", played.now, host=False)
    assert played["a"] is Presence.SILENT


def test_a_small_delay_changes_nothing(limits: LivenessLimits):
    liveness = Liveness(limits)
    liveness.look(1.0)
    assert not liveness.look(1.0 + limits.look_s + LATE_S - 0.01).late
    assert liveness.look(2.0).late


def test_signs_of_unknown_peers_are_ignored(limits: LivenessLimits):
    liveness = Liveness(limits)
    liveness.beat("x", 1.0)
    liveness.disconnected("x", 1.0)
    liveness.ask("x", 1.0)
    liveness.remember(["x"], 1.0)
    liveness.probe_ended("x", 1.0, host=True, service=True)
    liveness.forget("x")
    assert liveness.signs == {} and liveness.look(5.0) == LivenessLook()


def test_a_forgotten_peer_is_not_probed(limits: LivenessLimits):
    played = Played(limits).on(5)
    played.beating.discard("a")
    played.liveness.forget("a")
    played.liveness.forget("a")
    played.on(5)
    assert played.probed == [] and set(played.liveness.signs) == {"b"}


# Peers from which no message has arrived yet, which only the controller has


NEW_S, KNOWN_S = NODE_LIMITS.new_s, NODE_LIMITS.known_s


def test_a_new_node_is_lost_only_after_a_grace_period_without_answers():
    played = Played()
    played.beating.clear()
    played.power_off("b")
    played.liveness.ask("b", played.now)
    played.on(NEW_S - 1)
    assert played["a"] is played["b"] is Presence.NEVER and played.liveness.signs["b"].host is False
    played.on(4)
    assert (played["a"], played["b"]) == (Presence.NEVER, Presence.GONE)


def test_the_grace_period_of_a_new_node_starts_again_after_a_delay_of_the_controller():
    played = Played()
    played.beating = {"a"}
    played.power_off("b")
    played.on(1)
    played.now += NEW_S
    assert played.on(NEW_S - 1)["b"] is Presence.NEVER
    played.until("b", Presence.GONE, 4)


def successor(*beating: str) -> Played:
    """Return a new controller that knows that both nodes were in service before."""
    played = Played()
    played.beating = set(beating)
    played.liveness.remember(["a", "b"], played.now)
    return played


def test_a_known_node_is_lost_sooner_while_others_are_heard():
    played = successor("a")
    played.power_off("b")
    assert played.until("b", Presence.GONE, KNOWN_S + 1.0) >= KNOWN_S and played["a"] is Presence.CONNECTED
    assert len(played.probed) >= 5, "it was probed repeatedly before that"


def test_no_node_is_lost_sooner_while_none_is_heard():
    """The controller may be cut off, or have booted together with all nodes."""
    played = successor()
    for node in ("a", "b"):
        played.power_off(node)
    assert played.on(NEW_S - 1)["b"] is Presence.NEVER


def test_the_grace_period_starts_at_the_last_answer_of_the_host():
    played = successor("a")
    played.service.discard("b")
    assert played.on(NEW_S + 5)["b"] is Presence.NEVER, "its agent may be slow"
    played.power_off("b")
    assert played.until("b", Presence.GONE, KNOWN_S + 3.0) >= KNOWN_S - 2.5


def test_a_new_node_has_its_full_grace_period():
    played = Played()
    played.beating = {"a"}
    played.liveness.remember(["a"], played.now)
    played.power_off("b")
    assert played.on(NEW_S - 1)["b"] is Presence.NEVER


def test_the_service_can_be_probed_while_the_agent_is_connected():
    played = Played().on(5)
    played.service.discard("a")
    played.liveness.ask("a", played.now)
    played.on(1)
    assert played["a"] is Presence.CONNECTED
    assert played.liveness.signs["a"].service is False and played.liveness.signs["b"].service is None


def test_a_lost_node_is_probed_slowly():
    played = Played().on(5)
    played.power_off("a")
    played.until("a", Presence.GONE, 1.5)
    played.probed.clear()
    assert len(played.on(10).probed) == 5


# A coordinator waits as long after an answer as after a message


def test_a_host_that_answers_late_is_not_lost_sooner():
    played = Played(RUN_LIMITS).on(5)
    played.power_off("a")
    played.until("a", Presence.SILENT, 2.0)
    played.on(0.9 * RUN_LIMITS.probe_s)
    for answers in (played.host, played.service):
        answers.add("a")
    assert played.on(RUN_LIMITS.look_s)["a"] is Presence.SILENT
    played.power_off("a")
    assert played.until("a", Presence.GONE, 3.0) >= RUN_LIMITS.silent_s + RUN_LIMITS.probe_s - A_TICK_S


# Any order of events


class AnyEvents(RuleBasedStateMachine):
    """Two hosts: `steady` answers every probe, whatever its agent does; `frail` loses power and gets it back."""

    limits: LivenessLimits

    @initialize(new=st.booleans())
    def begin(self, new: bool) -> None:
        self.now, self.liveness = 100.0, Liveness(self.limits)
        self.powered, self.beating = {"steady", "frail"}, set[str]()
        self.heard: dict[str, float] = {}
        self.broken: set[str] = set()
        self.probes: dict[str, tuple[float, float]] = {}  # peer -> when its probe began, and when the host would answer
        self.late_at = self.began = self.asked_at = self.now
        # The time at which `frail` lost power, and the time by which it must be declared gone.
        self.dark: tuple[float, float] = (0.0, 0.0)
        self.liveness.look(self.now)
        for peer in ("steady", "frail"):
            self.liveness.expect(peer, self.now)
            if self.limits.new_s == 0 or not new:
                self.start_agent(peer)

    # What happens to the peers

    @rule(peer=st.sampled_from(["steady", "frail"]))
    def start_agent(self, peer: str) -> None:
        if peer in self.powered:
            self.beating.add(peer)
            self.hear(peer)

    @rule(peer=st.sampled_from(["steady", "frail"]))
    def stop_agent(self, peer: str) -> None:
        self.beating.discard(peer)

    @rule(peer=st.sampled_from(["steady", "frail"]))
    def end_agent(self, peer: str) -> None:
        if peer in self.powered and peer in self.heard:
            self.beating.discard(peer)
            self.broken.add(peer)
            self.liveness.disconnected(peer, self.now)

    @rule()
    def power_off(self) -> None:
        if "frail" in self.powered:
            self.powered.discard("frail")
            self.beating.discard("frail")
            self.set_deadline()

    @rule()
    def power_on(self) -> None:
        self.powered.add("frail")

    # What happens to the watcher

    @rule(looks=st.integers(1, 100), answer=st.floats(0.0, 0.9))
    def go_on(self, looks: int, answer: float) -> None:
        """Continue for this many checks. A host answers a probe after the share `answer` of the probe's time limit."""
        for _ in range(looks):
            self.now += self.limits.look_s
            self.look(answer)

    @rule(seconds=st.floats(0.01, 60.0))
    def block(self, seconds: float) -> None:
        self.now += self.limits.look_s + LATE_S + seconds
        self.look(0.0)
        assert self.late_at == self.now

    @precondition(lambda self: self.limits.new_s > 0)
    @rule(peer=st.sampled_from(["steady", "frail"]))
    def ask(self, peer: str) -> None:
        self.asked_at = self.now
        self.liveness.ask(peer, self.now)

    @precondition(lambda self: self.limits.new_s > 0)
    @rule()
    def remember(self) -> None:
        self.liveness.remember(["steady", "frail"], self.now)
        if self.liveness.signs["frail"].presence is Presence.NEVER:
            self.set_deadline()

    def look(self, answer: float) -> None:
        for peer in sorted(self.beating):
            if self.now >= self.heard[peer] + 0.4 * self.limits.silent_s:
                self.hear(peer)
        look = self.liveness.look(self.now)
        if look.late:
            self.probes.clear()
            self.late_at = self.now
            self.set_deadline()
        for peer in look.probe:
            self.probes[peer] = self.now, self.now + answer * self.limits.probe_s
        for peer, (began, answers) in list(self.probes.items()):
            if peer in self.powered and self.now >= answers:
                self.end_probe(peer, True)
            elif self.now >= began + self.limits.probe_s:
                self.end_probe(peer, False)

    def hear(self, peer: str) -> None:
        self.heard[peer] = self.now
        self.broken.discard(peer)
        self.liveness.beat(peer, self.now)

    def end_probe(self, peer: str, host: bool) -> None:
        """End a probe, and check that its verdict is not based on anything from before a delay of the watcher."""
        before, (began, _) = self.liveness.signs[peer].presence, self.probes.pop(peer)
        self.liveness.probe_ended(peer, self.now, host=host)
        after = self.liveness.signs[peer].presence
        if after is Presence.GONE and before is not Presence.GONE:
            assert not host and began >= self.late_at
            assert self.now >= began + self.limits.probe_s
        if after is Presence.GONE and before is Presence.NEVER:
            assert self.now >= max(self.began, self.late_at) + self.limits.known_s
        if after is Presence.AGENT_DEAD and before is Presence.SILENT and peer not in self.broken:
            assert self.now >= max(self.heard[peer], self.late_at) + self.limits.stuck_s - A_TICK_S

    def set_deadline(self) -> None:
        """Set the time at which a `frail` without power must be gone, unless the watcher is late again."""
        limits, presence = self.limits, self.liveness.signs["frail"].presence
        if presence is Presence.NEVER:
            wait_s = limits.new_s + max(limits.silent_s, limits.settled_s)
        elif presence is Presence.CONNECTED or self.now == self.late_at:
            wait_s = limits.silent_s
        else:
            wait_s = max(limits.again_s, limits.rest_s, limits.settled_s)
        self.dark = self.now, self.now + wait_s + limits.probe_s + 3 * limits.look_s

    @invariant()
    def a_host_that_answers_every_probe_is_never_gone(self) -> None:
        assert self.liveness.signs["steady"].presence is not Presence.GONE

    @invariant()
    def a_host_that_answers_nothing_is_gone_in_time(self) -> None:
        since, until = self.dark
        if self.asked_at >= since - self.limits.silent_s:  # the probe began before the silence
            until += self.limits.again_s + self.limits.probe_s
        if "frail" not in self.powered and self.now >= until:
            assert self.liveness.signs["frail"].presence is Presence.GONE

    @invariant()
    def a_beating_agent_is_connected(self) -> None:
        assert all(self.liveness.signs[peer].presence is Presence.CONNECTED for peer in self.beating)


class NodeEvents(AnyEvents):
    limits = NODE_LIMITS


class RunEvents(AnyEvents):
    limits = RUN_LIMITS


TestNodeEvents, TestRunEvents = NodeEvents.TestCase, RunEvents.TestCase
EXAMPLES = 60 if LONG else 30
TestNodeEvents.settings = TestRunEvents.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=30, deadline=None
)
