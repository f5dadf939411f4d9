"""The collector: success, failure, lateness, and the text of a scrape."""

from __future__ import annotations

import threading

from dalsegno.errors import DalsegnoError
from dalsegno.observe.collector import Collector, SourceGroup
from dalsegno.observe.exposition import Family, gauge, labelled
from dalsegno.observe.slurm_source import SeldomSource


class PlayedSource:
    """A source that returns the given values, or fails."""

    def __init__(self, name: str, *families: Family, skipped_rows: int = 0) -> None:
        self.name, self.families, self.skipped_rows = name, families, skipped_rows
        self.error: Exception | None = None

    def collect(self) -> tuple[Family, ...]:
        if self.error:
            raise self.error
        return self.families


class PlayedClock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_text_has_the_series_of_all_sources_and_how_each_went():
    collector = Collector([PlayedSource("a", gauge("x", "X.", 1)), PlayedSource("b", skipped_rows=3)])
    collector.collect()
    lines = collector.text().decode().splitlines()
    assert {"x 1", 'dalsegno_collector_success{source="a"} 1', 'dalsegno_collector_skipped_rows{source="b"} 3'} <= {
        *lines
    }


def test_nothing_is_served_before_the_first_collection():
    text = Collector([PlayedSource("a", gauge("x", "X.", 1))]).text().decode()
    assert 'dalsegno_collector_success{source="a"} 0' in text and "\nx " not in text
    assert 'dalsegno_collector_last_success_timestamp_seconds{source="a"} 0' in text


def test_source_that_fails_loses_its_series_and_keeps_the_time_of_its_last_success():
    source = PlayedSource("a", gauge("x", "X.", 1))
    collector = Collector([source, PlayedSource("b", gauge("y", "Y.", 2))])
    collector.collect()
    at = collector.statuses()[0].last_success_at
    source.error = DalsegnoError("slurmctld does not answer")
    collector.collect()
    text = collector.text().decode()
    assert 'dalsegno_collector_success{source="a"} 0' in text and "\nx " not in text and "\ny 2\n" in text
    assert collector.statuses()[0].last_success_at == at > 0


def test_bug_in_one_source_leaves_the_others_alone():
    broken, odd = PlayedSource("a"), PlayedSource("b", labelled("x", "X.", ["one"], {("1", "2"): 1}))
    broken.error = KeyError("bug")
    collector = Collector([broken, odd, PlayedSource("c", gauge("y", "Y.", 2))])
    collector.collect()
    assert [one.success for one in collector.statuses()] == [False, False, True]
    assert "\ny 2\n" in "\n" + collector.text().decode()


def test_name_of_another_source_is_refused():
    collector = Collector([PlayedSource("a", gauge("x", "X.", 1)), PlayedSource("b", gauge("x", "X.", 2))])
    collector.collect()
    assert [one.success for one in collector.statuses()] == [True, False]
    assert collector.text().count(b"# TYPE x ") == 1


def test_values_of_a_late_source_are_not_served():
    clock = PlayedClock()
    collector = Collector([PlayedSource("a", gauge("x", "X.", 1))], 10, clock=clock)
    collector.collect()
    clock.now_s += 50
    assert b'success{source="a"} 1' in collector.text()
    clock.now_s += 1
    assert b'success{source="a"} 0' in collector.text() and b"\nx " not in collector.text()


def test_source_that_hangs_does_not_delay_the_others():
    hangs, asked = threading.Event(), threading.Event()

    class Hanging:
        name = "hanging"

        def collect(self) -> list[Family]:
            hangs.wait(30)
            return []

    class Asked:
        name = "asked"

        def collect(self) -> list[Family]:
            asked.set()
            return []

    collector = Collector([SourceGroup((Hanging(),)), Asked()], 1000)
    collector.start()
    assert asked.wait(30)
    hangs.set()
    collector.close()


def test_answer_that_is_returned_again_keeps_its_time():
    source = SeldomSource("sshare", lambda: [gauge("x", "X.", 1)], every=3)
    collector = Collector([source])
    seen = []
    for _ in range(4):
        collector.collect()
        seen.append(collector.statuses()[0].last_success_at)
    assert seen[0] == seen[1] == seen[2] < seen[3]
