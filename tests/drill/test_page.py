"""Tests of the HTML page of a drill: well-formed, self-contained, and safe against markup in names."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

from dalsegno.demo.survival import NOTES, OTHERS, compare, remove_paths
from dalsegno.drill.impacts import Drill, DrillMark, DrillMarkKind, FaultImpact, TrainedStep
from dalsegno.drill.report import render_page, render_picture, seconds
from dalsegno.recovery.journal.event import EventKind

STEPS = tuple(TrainedStep(float(number), number, 3.0 - number / 50, 1 + number // 50) for number in range(100))
MARKS = (
    DrillMark(51.0, DrillMarkKind.KNOWN, "n1", "silent"),
    DrillMark(51.5, DrillMarkKind.DRAINED, "n1"),
    DrillMark(60.0, DrillMarkKind.RETURNED, "n1"),
)
DRILL = Drill(
    7, ("n1", "n2"), 0.0, 100.0, (FaultImpact(1, "power-off", "n1", 50.0),), MARKS, STEPS, {"productive": 90.0}
)


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def parsed(page: str) -> Balance:
    found = Balance()
    found.feed(page)
    assert found.open == []
    return found


def test_the_page_is_well_formed_and_loads_nothing():
    page = render_page(DRILL)
    parsed(page)
    assert not re.search(r"(src|href|url)\s*[=(]|<script|@import", page)


def test_the_page_shows_figures_loss_curve_and_time_out_of_service():
    page = render_page(DRILL)
    words = parsed(page).words
    assert {"the run survived 1 fault; 0 of 100 steps were repeated", "power-off", "1.0 s", "10.0 s"} <= set(words)
    assert page.count('class="curve"') == 2  # one for each generation
    assert page.count('class="gone"') == page.count('class="repairing"') == 1


def test_the_demo_page_compares_other_tools_and_says_that_hosts_are_virtual():
    words = parsed(render_page(DRILL, "the demo", compare(DRILL))).words
    ours = words[words.index("dalsegno run, with a spare (just now)") + 1 :]
    assert {"Comparison", *(word for line in OTHERS for word in line), *NOTES} <= set(words)
    assert any("virtual" in note for note in NOTES) and any("measured once" in note for note in NOTES)
    assert ours[0] == seconds(DRILL.recoveries[0].resumed_s), "our time is the measured one"


def test_names_are_escaped():
    bad = '<img src=x onerror="alert(1)">'
    page = render_page(
        Drill(
            7,
            (bad,),
            0.0,
            10.0,
            (FaultImpact(1, bad, bad, 5.0),),
            (DrillMark(6.0, DrillMarkKind.KNOWN, bad, bad),),
            STEPS,
        ),
        title=bad,
    )
    assert "<img" not in page
    parsed(page)


def test_an_empty_drill_has_a_page():
    parsed(render_page(Drill(7, (), 5.0, 5.0, (), (), ())))


def test_a_node_that_was_not_drained_is_not_shown_as_being_repaired():
    page = render_page(Drill(7, ("n1",), 0.0, 100.0, (FaultImpact(1, "power-off", "n1", 50.0),), (), STEPS))
    assert (page.count('class="gone"'), page.count('class="repairing"')) == (1, 0)


def test_the_picture_ends_with_the_last_event():
    waited = Drill(7, ("n1",), 0.0, 1000.0, (FaultImpact(1, "power-off", "n1", 50.0),), MARKS, STEPS)
    assert render_picture(waited) == render_picture(replace(waited, ended=waited.last_event_at))
    assert "990 s" not in render_picture(waited) and "90 s" in render_picture(waited)


def test_the_demo_page_names_no_file_of_the_removed_cluster():
    saved = DrillMark(52.0, EventKind.EVIDENCE, "n1", "evidence saved: /h o/clusters/demo/controller/evidence/n1/2026")
    page = render_page(remove_paths(replace(DRILL, marks=(*MARKS, saved)), "/h o/clusters/demo"))
    assert "evidence saved<" in page and "/h o" not in page
