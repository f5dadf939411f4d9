"""Checks in a process of their own: found, hanging, dying, and left out for a while."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from dalsegno.health.messages import Finding, GpuIdentity
from dalsegno.health.result import Verdict, passed
from dalsegno.node_agent.worker import FIRST_LEAVE_S, GPUS, CheckWatch
from dalsegno.wire.frames import Message

CHECK_S = 600.0  # on the tests' own clock


class Played:
    """Two checks; one of them does what it is told to."""

    def __init__(self, settings: Message) -> None:
        self.settings, self.turn = settings, 0

    def names(self) -> Iterable[str]:
        return ["good", "bad"]

    def look(self, without: frozenset[str]) -> Iterator[str | Finding]:
        self.turn += 1
        yield "good"
        yield Finding("good", passed(f"{self.settings.get('word', 'fine')} \n {self.turn}"), time.time())
        if "bad" in without:
            return
        yield "bad"
        if self.settings.get("bad") == "hangs":
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(1000)
        if self.settings.get("bad") == "dies":
            os._exit(3)
        yield Finding("bad", passed("fine"), time.time())

    def gpus(self) -> Iterable[GpuIdentity] | None:
        if self.settings.get("gpus") == "hang":
            time.sleep(1000)
        return [GpuIdentity(0, "GPU-1")]


class Watching:
    def __init__(self, **settings: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.findings: list[Finding] = []
        self.looks: list[tuple[list[str], list[GpuIdentity] | None]] = []
        self.ahead = 0.0  # our clock is so much before the real one
        self.watch = CheckWatch(Played, self.selector, self.findings.append, self._heard, time.time, CHECK_S)
        self.watch.set(settings)

    def _heard(self, names: list[str], gpus: list[GpuIdentity] | None) -> None:
        self.looks.append((names, gpus))

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end, f"did not happen in time: {self.findings}"
            due = self.watch.wake(time.monotonic() + self.ahead)
            for key, events in self.selector.select(min(max(due - self.ahead - time.monotonic(), 0), 0.05)):
                key.data(events, time.monotonic() + self.ahead)

    def hangs_in(self, check: str) -> None:
        """Until this check has begun, and then for longer than it may take."""
        self.until(lambda: self.watch._now_asked == check)
        self.ahead += CHECK_S

    def texts(self, check: str) -> list[str]:
        return [each.result.text for each in self.findings if each.check == check]


@pytest.fixture
def watching() -> Iterator[Callable[..., Watching]]:
    made: list[Watching] = []

    def make(**settings: str) -> Watching:
        made.append(Watching(**settings))
        return made[-1]

    yield make
    for each in made:
        each.watch.close()
        assert not each.selector.get_map()
        each.selector.close()


def test_findings_come_one_by_one_and_the_process_lives_on(watching: Callable[..., Watching]):
    one = watching()
    one.until(lambda: one.looks)
    assert [each.check for each in one.findings] == ["good", "bad"]
    assert one.looks == [(["good", "bad"], [GpuIdentity(0, "GPU-1")])]
    one.ahead += 1.0
    one.until(lambda: len(one.looks) == 2)
    assert one.texts("good") == ["fine ? 1", "fine ? 2"], "the same process, which remembers"


def test_other_settings_take_effect_at_once(watching: Callable[..., Watching]):
    one = watching()
    one.until(lambda: one.looks)
    one.watch.set({"word": "other"})
    one.until(lambda: one.texts("good")[-1] == "other ? 1")


@pytest.mark.parametrize(("how", "what"), [("hangs", "gave no answer"), ("dies", "ended")])
def test_a_check_that_hangs_or_dies_is_unknown_and_left_out_while_the_others_go_on(
    watching: Callable[..., Watching], how: str, what: str
):
    one = watching(bad=how)
    if how == "hangs":
        one.hangs_in("bad")
    one.until(lambda: one.texts("bad"))
    (finding,) = [each for each in one.findings if each.check == "bad"]
    assert finding.result.verdict is Verdict.UNKNOWN and what in finding.result.text
    one.until(lambda: one.looks)
    assert one.texts("good") == ["fine ? 1"] * 2 and len(one.texts("bad")) == 1
    one.ahead += FIRST_LEAVE_S
    if how == "hangs":
        one.hangs_in("bad")
    one.until(lambda: len(one.texts("bad")) == 2)
    assert "in 120 s" in one.texts("bad")[1], "longer each time"


def test_where_the_gpus_do_not_say_who_they_are_the_checks_go_on_without(watching: Callable[..., Watching]):
    one = watching(gpus="hang")
    one.hangs_in(GPUS)
    one.until(lambda: one.looks)
    assert one.looks == [(["good", "bad"], None)]
    assert one.texts(GPUS) == [f"the check gave no answer after 600 s; it is tried again in {FIRST_LEAVE_S:.0f} s"]
    one.ahead += FIRST_LEAVE_S
    one.hangs_in(GPUS)
    one.until(lambda: len(one.texts(GPUS)) == 2)
    assert one.texts(GPUS)[-1].endswith(f"in {2 * FIRST_LEAVE_S:.0f} s")


def test_everybody_who_tells_it_to_rest_hears_when_nothing_holds_the_gpus_any_more(watching: Callable[..., Watching]):
    one = watching()
    one.until(lambda: one.looks)
    told: list[str] = []
    until = time.monotonic() + one.ahead + 1000.0
    for who in ("first", "second"):
        one.watch.rest(until, lambda who=who: told.append(who))
    one.until(lambda: len(told) == 2)
    assert told == ["first", "second"]


def test_it_rests_until_it_is_told_otherwise_also_with_other_settings(watching: Callable[..., Watching]):
    one = watching()
    one.until(lambda: one.looks)
    told: list[str] = []
    one.watch.rest(time.monotonic() + one.ahead + 1000.0, lambda: told.append("rests"))
    one.watch.set({"word": "other"})
    one.until(lambda: told)
    assert one.watch.wake(time.monotonic() + one.ahead) > time.monotonic() + one.ahead + 900, "nothing is begun"
    one.watch.rest(time.monotonic() + one.ahead, lambda: told.append("looks again"))
    one.until(lambda: one.texts("good")[-1] == "other ? 1")
    assert told == ["rests", "looks again"]
