"""Tests of the process that runs the checks: findings, and checks that hang, die or are skipped for a while."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from dalsegno.health.messages import Finding, GpuIdentity, GpuReading
from dalsegno.health.result import Verdict, passed
from dalsegno.node_agent.worker import FIRST_LEAVE_S, GPUS, CheckWatch
from dalsegno.wire.frames import Message

CHECK_S = 600.0  # measured on the test's own clock


class Played:
    """Two checks; the settings choose the behaviour of one of them."""

    def __init__(self, settings: Message) -> None:
        self.settings, self.turn = settings, 0

    def names(self) -> Iterable[str]:
        return ["good", "bad"]

    def run_due(self, without: frozenset[str]) -> Iterator[str | Finding]:
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

    def readings(self) -> Iterable[GpuReading] | None:
        return [GpuReading(0, 41.0, 512, 81920, None)]


class Watching:
    def __init__(self, **settings: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.findings: list[Finding] = []
        self.looks: list[tuple[list[str], list[GpuIdentity] | None]] = []
        self.ahead = 0.0  # how far the test's clock is ahead of the real one
        self.watch = CheckWatch(Played, self.selector, self.findings.append, self._on_round, time.time, CHECK_S)
        self.watch.set(settings)

    def _on_round(self, names: list[str], gpus: list[GpuIdentity] | None) -> None:
        self.looks.append((names, gpus))

    def until(self, true: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not true():
            assert time.monotonic() < end, f"did not happen in time: {self.findings}"
            due = self.watch.wake(time.monotonic() + self.ahead)
            for key, events in self.selector.select(min(max(due - self.ahead - time.monotonic(), 0), 0.05)):
                key.data(events, time.monotonic() + self.ahead)

    def hangs_in(self, check: str) -> None:
        """Wait until this check has started, then move the clock past its timeout."""
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


def test_findings_arrive_one_by_one_from_one_process(watching: Callable[..., Watching]):
    one = watching()
    one.until(lambda: one.looks)
    assert [each.check for each in one.findings] == ["good", "bad"]
    assert one.looks == [(["good", "bad"], [GpuIdentity(0, "GPU-1")])]
    one.ahead += 1.0
    one.until(lambda: len(one.looks) == 2)
    assert one.texts("good") == ["fine ? 1", "fine ? 2"], "the same process, which keeps its state"


def test_new_settings_take_effect_at_once(watching: Callable[..., Watching]):
    one = watching()
    one.until(lambda: one.looks)
    one.watch.set({"word": "other"})
    one.until(lambda: one.texts("good")[-1] == "other ? 1")


@pytest.mark.parametrize(("how", "what"), [("hangs", "gave no answer"), ("dies", "ended")])
def test_a_check_that_hangs_or_dies_is_unknown_and_skipped_for_a_while(
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


def test_checks_continue_while_the_gpu_list_hangs(watching: Callable[..., Watching]):
    one = watching(gpus="hang")
    one.hangs_in(GPUS)
    one.until(lambda: one.looks)
    assert one.looks == [(["good", "bad"], None)]
    assert one.texts(GPUS) == [f"the check gave no answer after 600 s; next attempt in {FIRST_LEAVE_S:.0f} s"]
    one.ahead += FIRST_LEAVE_S
    one.hangs_in(GPUS)
    one.until(lambda: len(one.texts(GPUS)) == 2)
    assert one.texts(GPUS)[-1].endswith(f"in {2 * FIRST_LEAVE_S:.0f} s")


def test_every_rest_order_is_answered_once_the_gpus_are_released(watching: Callable[..., Watching]):
    one = watching()
    one.until(lambda: one.looks)
    answered: list[str] = []
    until = time.monotonic() + one.ahead + 1000.0
    for who in ("first", "second"):
        one.watch.rest(until, lambda who=who: answered.append(who))
    one.until(lambda: len(answered) == 2)
    assert answered == ["first", "second"]


def test_rest_lasts_until_it_is_ended_even_with_new_settings(watching: Callable[..., Watching]):
    one = watching()
    one.until(lambda: one.looks)
    answered: list[str] = []
    one.watch.rest(time.monotonic() + one.ahead + 1000.0, lambda: answered.append("rests"))
    one.watch.set({"word": "other"})
    one.until(lambda: answered)
    assert one.watch.wake(time.monotonic() + one.ahead) > time.monotonic() + one.ahead + 900, "nothing is started"
    one.watch.rest(time.monotonic() + one.ahead, lambda: answered.append("looks again"))
    one.until(lambda: one.texts("good")[-1] == "other ? 1")
    assert answered == ["rests", "looks again"]
