"""Frames of the view: whole screens against golden files, and single rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dalsegno.cli.live.facts import LiveFacts, SourceHealth, live_facts
from dalsegno.cli.live.frame import Frame, ScreenSize, frame_text, render, share_rows
from dalsegno.cli.live.text import columns_of, plain_text
from dalsegno.cli.live.view import Panel, ViewState
from dalsegno.health.messages import GpuReading
from dalsegno.overview.facts import Overview
from dalsegno.recovery.journal.event import Event, EventKind, EventStage
from dalsegno.runs.coordinator.reports.goodput import Goodput, TimeKind, TrainingProgress
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase
from dalsegno.slurm.facts import JobState
from dalsegno.targets.base import JobStatus
from tests.overview.clusters import healthy, node, replacing, run, with_node, with_runs, with_status

NOW = 1_700_000_000.0
TERMINAL = ScreenSize(80, 24)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def shown(overview: Overview, slurm: SourceHealth | None = None, controller: SourceHealth | None = None) -> LiveFacts:
    answered = SourceHealth(NOW)
    return live_facts(overview, overview.status, overview.controller, slurm or answered, controller or answered)


def job(number: int, name: str, nodes: str, state: JobState = JobState.RUNNING, user: str = "ada") -> JobStatus:
    reason = "Resources" if state is JobState.PENDING else ""
    return JobStatus(str(number), name, user, "train", state, nodes, 8, 3700, reason)


def training() -> Overview:
    """Return a cluster with a run that lost a node, another user's job, a waiting job and events."""
    spent = {TimeKind.PRODUCTIVE: 95.0, TimeKind.LOST: 5.0}
    progress = TrainingProgress(Goodput(NOW, spent, step=12345), {"loss": 2.34567, "step_s": 0.2134})
    members = tuple(RunNodeStatus(f"train-{number}", NodeRole.MEMBER, number) for number in (1, 3, 4, 5))
    gpt = run("gpt-k3f9x", created=NOW - 5000, started=NOW - 4000, nodes=members, jobs=(7,), generation=2, lost_nodes=1)
    done = run("mlp-00abc", RunPhase.ENDED, created=NOW - 9000, started=NOW - 8900, ended=NOW - 8000, exit_code=0)
    overview = with_runs(replacing(healthy()), replace(gpt, progress=progress), done)
    jobs = (job(7, "gpt-k3f9x", "train-[1,3-5]"), job(8, "notebook", "train-1", user="bob"),
            job(9, "sweep", "", JobState.PENDING, "bob"))  # fmt: skip
    events = tuple(
        Event(number, NOW - 60 + number, "train-2", EventKind.TURN, text, stage)
        for number, (text, stage) in enumerate((
            ("is lost: no answer for 1.0 s", EventStage.SUSPECTED), ("set down", EventStage.DONE),
            ("replaced", EventStage.BEGUN),
        ))
    )  # fmt: skip
    figures = {"train-1": tuple(GpuReading(gpu, 60.0 + gpu, 40_960.0, 81_920.0, 90.0 + gpu) for gpu in range(8))}
    overview = with_status(overview, jobs=jobs, facts={"Slurm": "22.05.8"})
    return replace(with_node(overview, "train-1", gpus_used=8, state="allocated"), events=events, gpus=figures)


def large(count: int) -> Overview:
    return replacing(healthy(count), f"train-{count}")


SCREENS: dict[str, tuple[Overview, ViewState, ScreenSize]] = {
    "training-80x24": (training(), ViewState(), TERMINAL),
    "training-40x12": (training(), ViewState(panel=Panel.RUNS), ScreenSize(40, 12)),
    "training-200x50": (training(), ViewState(), ScreenSize(200, 50)),
    "training-pipe": (training(), ViewState(), ScreenSize(None, None)),
    "one-node-80x24": (healthy(1), ViewState(), TERMINAL),
    "1000-nodes-120x40": (large(1000), ViewState(offsets={Panel.NODES: 500}), ScreenSize(120, 40)),
    "filter-80x24": (training(), ViewState(filter="bob", typing=True), TERMINAL),
    "help-80x24": (training(), ViewState(help=True), TERMINAL),
}


@pytest.mark.parametrize("name", SCREENS)
def test_frames_match_the_golden_files(name: str, golden: Callable[[str, str], None]):
    overview, view, size = SCREENS[name]
    golden(f"top/{name}.txt", frame_text(render(shown(overview), view, size, NOW)) + "\n")


def test_silent_sources_are_named_with_the_age_of_what_is_shown(golden: Callable[[str, str], None]):
    silent = with_status(training(), jobs=None, nodes=())
    slurm, controller = SourceHealth(NOW - 90, NOW - 89), SourceHealth(None, NOW - 5)
    facts = live_facts(replace(silent, controller=None), training().status, training().controller, slurm, controller)
    golden("top/silent-80x24.txt", frame_text(render(facts, ViewState(), TERMINAL, NOW)) + "\n")


def widths(frame: Frame) -> set[int]:
    return {columns_of("".join(part.text for part in line)) for line in frame.lines}


@pytest.mark.parametrize("columns", [1, 10, 23, 24, 25, 31, 40, 57, 80, 81, 132, 500])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 9, 13, 14, 24, 100])
def test_no_frame_is_larger_than_the_screen(columns: int, rows: int):
    wide = with_node(training(), "train-3", state="drained", reason="電源が落ちた " * 20, reason_user="bob")
    for panel in Panel:
        frame = render(shown(wide), ViewState(panel=panel), ScreenSize(columns, rows), NOW)
        assert len(frame.lines) <= rows and max(widths(frame)) <= columns


def test_hostile_texts_are_escaped_everywhere():
    evil = "\x1b[2J\r\n\u202egpj\x07"
    overview = training()
    overview = with_status(
        with_node(overview, "train-3", reason=evil),
        jobs=(job(8, evil, "train-1", user=evil),), problems=(evil,), facts={"Slurm": evil},
    )  # fmt: skip
    overview = with_runs(overview, run("gpt-k3f9x", RunPhase.WAITING, message=evil, user=evil))
    overview = replace(overview, events=(Event(1, NOW, evil, EventKind.NOTE, evil),))
    for size in (TERMINAL, ScreenSize(200, 60), ScreenSize(None, None)):
        frame = render(shown(overview), ViewState(filter=""), size, NOW)
        assert all(part.text.isprintable() for line in frame.lines for part in line)


def test_nodes_that_need_attention_come_first():
    text = frame_text(render(shown(large(1000)), ViewState(), TERMINAL, NOW))
    assert text.index("train-1000 ") < text.index("train-1 ") < text.index("train-2 ")


def test_selected_panel_gets_the_most_rows():
    counts = {Panel.NODES: 1000, Panel.GPUS: 1000, Panel.RUNS: 2, Panel.EVENTS: 100}
    heights = share_rows(counts, Panel.EVENTS, 40)
    assert heights == {Panel.NODES: 5, Panel.GPUS: 5, Panel.RUNS: 4, Panel.EVENTS: 26}
    assert share_rows(counts, Panel.NODES, 20) == {Panel.NODES: 10, Panel.GPUS: 4, Panel.RUNS: 3, Panel.EVENTS: 3}
    for room in (10, 12, 16):  # a row of each panel would leave too little space for the selected panel
        assert share_rows(counts, Panel.EVENTS, room) == {Panel.EVENTS: room}
    assert sum(share_rows(dict.fromkeys(Panel, 1), Panel.NODES, 100).values()) == 12


def test_screen_that_is_too_small_says_so_in_its_width():
    frame = render(shown(training()), ViewState(), ScreenSize(23, 5), NOW)
    assert frame_text(frame).splitlines()[1] == "screen too small"


def test_first_frame_says_that_nothing_is_known_yet():
    assert "waiting" in frame_text(render(None, ViewState(), TERMINAL, NOW))


def test_paused_view_says_so():
    frame = render(shown(healthy()), ViewState(paused=True), TERMINAL, NOW)
    assert plain_text(frame.lines[0]).endswith("paused at 22:13:20")


def test_other_jobs_of_a_node_are_counted():
    overview = with_status(
        healthy(), nodes=(node("n1"),), jobs=(job(1, "a", "n1"), job(2, "b", "n1"), job(3, "c", "n[1-"))
    )
    assert "1 ada +1" in frame_text(render(shown(overview), ViewState(), TERMINAL, NOW))
