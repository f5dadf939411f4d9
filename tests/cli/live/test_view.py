"""Keys, the state of the view, text widths, and readings from sources that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.cli.live.keys import Key, KeyDecoder
from dalsegno.cli.live.readings import EVENTS, LiveReadings, LiveSource, default_interval_s
from dalsegno.cli.live.table import Column, cells, lay_out
from dalsegno.cli.live.text import columns_of, cut, fill
from dalsegno.cli.live.view import MAX_FILTER, Panel, PanelSize, ViewState, press
from dalsegno.errors import DalsegnoError
from dalsegno.health.messages import GpuReading
from dalsegno.overview.gather import read_agents
from dalsegno.overview.verdict import VerdictCode, describe
from dalsegno.recovery.agents.view import AgentView, views_message
from dalsegno.recovery.journal.event import Event, EventKind
from dalsegno.wire.liveness import Presence
from tests.cli.live.played import FailingSources, PlayedSources
from tests.overview.clusters import healthy

SIZES = {Panel.NODES: PanelSize(shown=10, total=25)}


def after(*keys: Key | str, view: ViewState | None = None) -> ViewState:
    view = view or ViewState()
    for key in keys:
        view = press(view, key, SIZES)
    return view


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1bOB\x1b[5~\x1b[6~", [Key.UP, Key.DOWN, Key.PAGE_UP, Key.PAGE_DOWN]),
        (b"\x1b[H\x1b[4~\x1b[Z\t\r", [Key.HOME, Key.END, Key.BACK_TAB, Key.TAB, Key.ENTER]),
        (b"\x7f\x0c", [Key.BACKSPACE, Key.REDRAW]),
        (b"\x1bq", [Key.ESCAPE, "q"]),
        ("é漢".encode(), ["é", "漢"]),
        (b"\x1b[200~\x00\xff", []),
        (b"\x1b[1;5A", []),
    ],
)
def test_bytes_become_keys_however_they_are_split(data: bytes, keys: list[Key | str]):
    assert KeyDecoder().feed(data) == keys
    decoder = KeyDecoder()
    assert [key for byte in data for key in decoder.feed(bytes([byte]))] == keys


def test_escape_alone_is_a_key_after_a_while():
    decoder = KeyDecoder()
    assert decoder.feed(b"\x1b") == [] and decoder.unfinished
    assert decoder.flush() == [Key.ESCAPE] and not decoder.unfinished
    assert decoder.feed(b"\x1b[" + b"1" * 100) != [] or not decoder.unfinished, "an endless sequence is dropped"


def test_scrolling_stays_within_the_rows():
    assert after(Key.UP).offsets[Panel.NODES] == 0
    assert after("j", Key.DOWN).offsets[Panel.NODES] == 2
    assert after(Key.PAGE_DOWN).offsets[Panel.NODES] == 9
    assert after("G").offsets[Panel.NODES] == 15 == after("G", "j").offsets[Panel.NODES]
    assert after("G", "k").offsets[Panel.NODES] == 14
    assert after("j", view=ViewState(offsets={Panel.NODES: 99})).offsets[Panel.NODES] == 15, "rows have gone"


def test_panels_are_selected_by_number_and_tab():
    assert after("3").panel is Panel.RUNS
    assert after(Key.TAB).panel is Panel.GPUS and after(Key.BACK_TAB).panel is Panel.EVENTS


def test_filter_takes_every_character_until_enter_or_escape():
    typed = after("/", "q", "1", "x", Key.BACKSPACE)
    assert (typed.filter, typed.typing, typed.quit) == ("q1", True, False)
    assert after(Key.ENTER, view=typed).filter == "q1" and not after(Key.ENTER, view=typed).typing
    assert after(Key.ESCAPE, view=typed).filter == "" and after(Key.ENTER, Key.ESCAPE, view=typed).filter == ""
    assert len(after("/", *"x" * 200).filter) == MAX_FILTER


def test_remaining_keys_change_the_view():
    assert after("q").quit and after("p").paused and not after("p", "p").paused
    assert after("?").help and not after("?", "x").help and after("?", "q").quit
    assert after("%") == ViewState()


def test_wide_and_combining_characters_are_measured():
    assert (columns_of("abc"), columns_of("漢字"), columns_of("e\u0301")) == (3, 4, 1)
    assert (
        cut("漢字漢字", 5) == "漢字…" and cut("漢字漢字", 4) == "漢…" and cut("abc", 3) == "abc" and cut("abc", 0) == ""
    )
    assert fill("漢", 4) == "漢  " and fill("漢", 4, right=True) == "  漢" and fill("a\nb", 4) == "a\\nb"


def test_columns_are_left_out_when_the_screen_is_narrow():
    columns = (Column("NAME"), Column("OTHER", drop=2), Column("SOME", drop=1), Column("REST"))
    rows = [cells("node-1", "x" * 10, "y" * 10, "z" * 100)]
    assert lay_out(columns, rows, None) == [6, 10, 10, 100]
    assert lay_out(columns, rows, 80) == [6, 10, 10, 48]
    assert lay_out(columns, rows, 40) == [6, 0, 10, 20]
    assert lay_out(columns, rows, 20) == [6, 0, 0, 12]
    assert lay_out(columns, rows, 5) == [6, 0, 0, 0]


def test_large_clusters_are_queried_less_often():
    assert [default_interval_s(count) for count in (0, 4, 64, 128, 1000)] == [1, 1, 1, 2, 5]


def test_last_known_state_is_kept_while_sources_do_not_answer():
    sources = PlayedSources(healthy())
    now = [100.0]
    readings = LiveReadings(sources, lambda: now[0])
    assert readings.facts() is None
    for source in LiveSource:
        readings.poll(source)
    sources.slurm = sources.controller_answers = False
    for now[0] in (101.0, 102.0):
        readings.poll(LiveSource.SLURM)
        readings.poll(LiveSource.CONTROLLER)
    facts = readings.facts()
    assert facts is not None and len(facts.overview.status.nodes) == 5 and facts.overview.controller is not None
    assert facts.verdict.codes[:2] == (VerdictCode.SLURM_SILENT, VerdictCode.CONTROLLER_SILENT)
    assert (facts.slurm.answered_at, facts.slurm.silent_since) == (100.0, 101.0)
    sources.slurm = sources.controller_answers = True
    for source in LiveSource:
        readings.poll(source)
    again = readings.facts()
    assert again is not None and describe(again.verdict) == "healthy" and again.slurm.silent_since is None


@pytest.mark.parametrize("error", [DalsegnoError("the cluster is damaged"), PermissionError(13, "Permission denied")])
def test_cluster_that_cannot_be_read_at_all_is_an_error(error: Exception):
    readings = LiveReadings(FailingSources(healthy(), error))
    readings.poll(LiveSource.SLURM)
    with pytest.raises(type(error), match=r"damaged|denied"):
        readings.facts()


def test_only_the_last_events_are_kept():
    sources = PlayedSources(healthy())
    readings = LiveReadings(sources)
    readings.poll(LiveSource.SLURM)
    for first in range(0, 3 * EVENTS, EVENTS):
        events = tuple(Event(first + number, 0.0, "n1", EventKind.NOTE, "x") for number in range(1, EVENTS + 1))
        sources.overview = replace(sources.overview, events=events)
        readings.poll(LiveSource.CONTROLLER)
    facts = readings.facts()
    assert facts is not None and [facts.overview.events[at].id for at in (0, -1)] == [2 * EVENTS + 1, 3 * EVENTS]


def agent(node: str, presence: Presence, *gpus: GpuReading) -> AgentView:
    return AgentView(node, presence, readings=gpus)


def test_gpu_readings_come_from_connected_agents():
    gpu = GpuReading(0, 61.5, 1024, 4096, 95)
    views = [
        agent("n1", Presence.CONNECTED, gpu, GpuReading(1)),
        agent("n2", Presence.AGENT_DEAD, gpu),  # the last readings of this agent are old
        agent("n3", Presence.CONNECTED),
    ]
    assert read_agents(views_message(views)) == {"n1": (gpu, GpuReading(1))}
    assert read_agents({"error": "unknown request"}) == {}, "a controller of another version"


def test_gpu_readings_are_not_shown_while_the_controller_is_silent():
    gpus = {"train-1": (GpuReading(0, 60.0),)}
    sources = PlayedSources(replace(healthy(), gpus=gpus))
    readings = LiveReadings(sources)
    for source in (LiveSource.SLURM, LiveSource.CONTROLLER):
        readings.poll(source)
    facts = readings.facts()
    assert facts is not None and facts.overview.gpus == gpus
    sources.controller_answers = False
    readings.poll(LiveSource.CONTROLLER)
    facts = readings.facts()
    assert facts is not None and facts.overview.gpus == {}
