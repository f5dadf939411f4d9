"""Tests of detecting lost nodes by their signs of life."""

from __future__ import annotations

from dalsegno.recovery.agent_view import Presence
from dalsegno.recovery.presence import KNOWN_S, LOOK_S, NEW_S, PROBE_S, STUCK_S, Attendance

BEAT_S = 0.4


class Played:
    """The attendance of `a` and `b` with our own clock; the test chooses heartbeats and answers to probes."""

    def __init__(self) -> None:
        self.now, self.attendance = 100.0, Attendance()
        self.beating, self.host, self.slurmd = {"a", "b"}, {"a", "b"}, {"a", "b"}
        self.beats: dict[str, float] = {}
        self.probes: dict[str, float] = {}
        self.probed: list[str] = []
        for node in ("a", "b"):
            self.attendance.expect(node, self.now)

    def on(self, seconds: float) -> Played:
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += LOOK_S
            for node in self.beating:
                if self.now - self.beats.get(node, 0.0) >= BEAT_S - 1e-9:
                    self.beats[node] = self.now
                    self.attendance.beat(node, self.now)
            self._end_probes()
            for node in self.attendance.look(self.now).probe:
                self.probes[node] = self.now + PROBE_S
                self.probed.append(node)
        return self

    def _end_probes(self) -> None:
        for node in list(self.probes):
            host, slurmd = node in self.host, node in self.slurmd
            if (host and slurmd) or self.probes[node] <= self.now + 1e-9:
                del self.probes[node]
                self.attendance.probe_ended(node, self.now, host=host, slurmd=slurmd)

    def power_off(self, node: str) -> None:
        for signs in (self.beating, self.host, self.slurmd):
            signs.discard(node)

    def __getitem__(self, node: str) -> Presence:
        return self.attendance.signs[node].presence

    def until(self, node: str, presence: Presence, at_most_s: float) -> float:
        began = self.now
        while self[node] is not presence:
            assert self.now - began < at_most_s, f"{node} is {self[node]}"
            self.on(LOOK_S)
        return self.now - began


def test_a_node_with_heartbeats_is_never_probed():
    played = Played().on(5)
    assert played["a"] is played["b"] is Presence.CONNECTED and played.probed == []


def test_a_node_without_power_is_lost_within_a_second_and_a_half():
    played = Played().on(5)
    played.power_off("a")
    assert played.until("a", Presence.GONE, 1.5) >= 1.0 - BEAT_S
    assert played["b"] is Presence.CONNECTED


def test_a_silent_agent_on_a_live_host_is_declared_dead_not_lost():
    played = Played().on(5)
    played.beating.discard("a")
    played.until("a", Presence.SILENT, 1.1)
    played.on(STUCK_S - 3)
    assert played["a"] is Presence.SILENT
    played.until("a", Presence.AGENT_DEAD, 4)
    played.power_off("a")
    played.until("a", Presence.GONE, 1)


def test_an_answer_of_slurmd_alone_keeps_a_node_alive():
    played = Played().on(5)
    played.beating.discard("a")
    played.host.discard("a")  # such as with a firewall
    played.on(3)
    assert played["a"] is Presence.SILENT and played.attendance.signs["a"].slurmd


def test_a_broken_connection_is_probed_at_once():
    played = Played().on(5)
    for node in ("a", "b"):
        played.beating.discard(node)
        played.attendance.disconnected(node, played.now)
    played.power_off("b")
    assert played.until("a", Presence.AGENT_DEAD, 0.2) <= 0.2
    assert played.until("b", Presence.GONE, 0.5) <= 0.5


def test_a_returning_agent_is_connected_from_any_state():
    played = Played().on(5)
    played.power_off("a")
    played.on(3)
    played.beating.add("a")
    played.on(0.1)
    assert played["a"] is Presence.CONNECTED


def test_after_a_delay_of_the_controller_all_periods_start_again():
    played = Played().on(5)
    played.beating.clear()
    played.host.clear()
    played.slurmd.clear()
    played.on(1.2)
    played.now += 5  # the controller was stopped while a probe was in progress
    look = played.attendance.look(played.now)
    assert look.late and look.probe == ()
    played.probes.clear()
    played.on(0.8)
    assert played["a"] is played["b"] is Presence.SILENT
    played.beating |= {"b"}
    played.on(1.0)
    assert (played["a"], played["b"]) == (Presence.GONE, Presence.CONNECTED)


def test_a_small_delay_changes_nothing():
    attendance = Attendance()
    attendance.look(1.0)
    assert not attendance.look(1.0 + LOOK_S + 0.29).late
    assert attendance.look(2.0).late


def test_a_new_node_is_lost_only_after_a_grace_period_without_answers():
    played = Played()
    played.beating.clear()
    played.power_off("b")
    played.attendance.ask("b", played.now)
    played.on(NEW_S - 1)
    assert played["a"] is played["b"] is Presence.NEVER and played.attendance.signs["b"].host is False
    played.on(4)
    assert (played["a"], played["b"]) == (Presence.NEVER, Presence.GONE)


def successor(*beating: str) -> Played:
    """Return a new controller that knows that both nodes were in service before."""
    played = Played()
    played.beating = set(beating)
    played.attendance.remember(["a", "b"], played.now)
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
    played.slurmd.discard("b")
    assert played.on(NEW_S + 5)["b"] is Presence.NEVER, "its agent may be slow"
    played.power_off("b")
    assert played.until("b", Presence.GONE, KNOWN_S + 3.0) >= KNOWN_S - 2.5


def test_a_new_node_has_its_full_grace_period():
    played = Played()
    played.beating = {"a"}
    played.attendance.remember(["a"], played.now)
    played.power_off("b")
    assert played.on(NEW_S - 1)["b"] is Presence.NEVER


def test_slurmd_can_be_probed_while_the_agent_is_connected():
    played = Played().on(5)
    played.slurmd.discard("a")
    played.attendance.ask("a", played.now)
    played.on(1)
    assert played["a"] is Presence.CONNECTED
    assert played.attendance.signs["a"].slurmd is False and played.attendance.signs["b"].slurmd is None


def test_signs_of_unknown_nodes_are_ignored():
    attendance = Attendance()
    attendance.beat("x", 1.0)
    attendance.disconnected("x", 1.0)
    attendance.probe_ended("x", 1.0, host=True, slurmd=True)
    attendance.forget("x")
    assert attendance.signs == {}
