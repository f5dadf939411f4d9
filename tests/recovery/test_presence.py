"""Who is there and who is gone, by signs of life alone."""

from __future__ import annotations

from dalsegno.recovery.agent_view import Presence
from dalsegno.recovery.presence import KNOWN_S, LOOK_S, NEW_S, PROBE_S, STUCK_S, Attendance

BEAT_S = 0.4


class Played:
    """Attendance of `a` and `b`, with a clock of our own: beats come and probes are answered as they are told to."""

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
                self.attendance.answered(node, self.now, host=host, slurmd=slurmd)

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


def test_who_beats_is_connected_and_never_probed():
    played = Played().on(5)
    assert played["a"] is played["b"] is Presence.CONNECTED and played.probed == []


def test_a_node_without_power_is_gone_within_a_second_and_a_half():
    played = Played().on(5)
    played.power_off("a")
    assert played.until("a", Presence.GONE, 1.5) >= 1.0 - BEAT_S
    assert played["b"] is Presence.CONNECTED


def test_a_silent_agent_on_a_host_that_answers_is_not_gone_but_dead_when_it_stays_so():
    played = Played().on(5)
    played.beating.discard("a")
    played.until("a", Presence.SILENT, 1.1)
    played.on(STUCK_S - 3)
    assert played["a"] is Presence.SILENT
    played.until("a", Presence.AGENT_DEAD, 4)
    played.power_off("a")
    played.until("a", Presence.GONE, 1)


def test_slurmd_alone_is_witness_enough_that_a_node_lives():
    played = Played().on(5)
    played.beating.discard("a")
    played.host.discard("a")  # a firewall, say
    played.on(3)
    assert played["a"] is Presence.SILENT and played.attendance.signs["a"].slurmd


def test_a_connection_that_breaks_is_asked_after_at_once():
    played = Played().on(5)
    for node in ("a", "b"):
        played.beating.discard(node)
        played.attendance.broke(node, played.now)
    played.power_off("b")
    assert played.until("a", Presence.AGENT_DEAD, 0.2) <= 0.2
    assert played.until("b", Presence.GONE, 0.5) <= 0.5


def test_an_agent_that_comes_back_is_connected_whatever_it_was():
    played = Played().on(5)
    played.power_off("a")
    played.on(3)
    played.beating.add("a")
    played.on(0.1)
    assert played["a"] is Presence.CONNECTED


def test_after_a_pause_of_our_own_everyone_is_forgiven_one_period():
    played = Played().on(5)
    played.beating.clear()
    played.host.clear()
    played.slurmd.clear()
    played.on(1.2)
    played.now += 5  # we were stopped, a probe was under way
    look = played.attendance.look(played.now)
    assert look.late and look.probe == ()
    played.probes.clear()
    played.on(0.8)
    assert played["a"] is played["b"] is Presence.SILENT
    played.beating |= {"b"}
    played.on(1.0)
    assert (played["a"], played["b"]) == (Presence.GONE, Presence.CONNECTED)


def test_a_look_that_is_a_little_late_forgives_nobody():
    attendance = Attendance()
    attendance.look(1.0)
    assert not attendance.look(1.0 + LOOK_S + 0.29).late
    assert attendance.look(2.0).late


def test_a_node_that_was_never_heard_of_is_gone_only_after_a_while_and_without_an_answer():
    played = Played()
    played.beating.clear()
    played.power_off("b")
    played.attendance.ask("b", played.now)
    played.on(NEW_S - 1)
    assert played["a"] is played["b"] is Presence.NEVER and played.attendance.signs["b"].host is False
    played.on(4)
    assert (played["a"], played["b"]) == (Presence.NEVER, Presence.GONE)


def successor(*beating: str) -> Played:
    """A controller that begins after another, and knows from it that both nodes were in service."""
    played = Played()
    played.beating = set(beating)
    played.attendance.remember(["a", "b"], played.now)
    return played


def test_a_node_that_a_former_controller_knew_is_missed_sooner_while_others_are_heard():
    played = successor("a")
    played.power_off("b")
    assert played.until("b", Presence.GONE, KNOWN_S + 1.0) >= KNOWN_S and played["a"] is Presence.CONNECTED
    assert len(played.probed) >= 5, "and was asked again and again before that"


def test_a_controller_that_hears_nobody_misses_nobody_sooner():
    """It may be cut off, or have booted together with all of them."""
    played = successor()
    for node in ("a", "b"):
        played.power_off(node)
    assert played.on(NEW_S - 1)["b"] is Presence.NEVER


def test_a_host_that_answers_is_not_missed_and_has_its_time_from_its_last_answer():
    played = successor("a")
    played.slurmd.discard("b")
    assert played.on(NEW_S + 5)["b"] is Presence.NEVER, "its agent may be slow"
    played.power_off("b")
    assert played.until("b", Presence.GONE, KNOWN_S + 3.0) >= KNOWN_S - 2.5


def test_a_new_node_has_its_whole_time_whoever_else_is_heard():
    played = Played()
    played.beating = {"a"}
    played.attendance.remember(["a"], played.now)
    played.power_off("b")
    assert played.on(NEW_S - 1)["b"] is Presence.NEVER


def test_slurmd_can_be_asked_after_while_the_agent_beats():
    played = Played().on(5)
    played.slurmd.discard("a")
    played.attendance.ask("a", played.now)
    played.on(1)
    assert played["a"] is Presence.CONNECTED
    assert played.attendance.signs["a"].slurmd is False and played.attendance.signs["b"].slurmd is None


def test_what_is_told_of_strangers_is_nothing():
    attendance = Attendance()
    attendance.beat("x", 1.0)
    attendance.broke("x", 1.0)
    attendance.answered("x", 1.0, host=True, slurmd=True)
    attendance.forget("x")
    assert attendance.signs == {}
