"""The live picture, its stream, and the history of runs."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.health.messages import BadReport, GpuReading, GpuReadings, parse_agent_message, readings_message
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.runs.run_records import RunRecord
from dalsegno.runs.coordinator.reports import history
from dalsegno.runs.coordinator.reports.history import HistoryWriter, StepPoint, parse_history
from dalsegno.runs.status import RunPhase, RunStatus, write_status
from dalsegno.slurm.facts import NodeFlag, NodeState
from dalsegno.slurm.parse.text import gpu_indexes_in_gres
from dalsegno.web.live import LivePicture
from dalsegno.web.pages.runs import marks_of, spans_of
from dalsegno.web.run_files import read_entries, read_owned, read_points, read_run
from dalsegno.web.snapshot import (
    AgentReport,
    ClusterPicture,
    ControllerPart,
    NodeRecoveryDetail,
    NodeTone,
    SlurmPart,
    SourceTrouble,
    gpu_views,
    node_views,
    tone_of,
)
from dalsegno.web.sources import PlayedSources, SourceSilent, parse_agent
from dalsegno.web.stream import follow
from dalsegno.web.view import PagePart, changes
from dalsegno.wire.liveness import Presence
from tests.web.played import NOW, job, journal, node, run, small_cluster


@pytest.fixture
def sources() -> PlayedSources:
    return small_cluster()


@pytest.fixture
def live(sources: PlayedSources) -> Iterator[LivePicture]:
    made = LivePicture(sources, "played")
    made.start()
    yield made
    made.close()


def test_sources_are_not_queried_while_nobody_watches():
    asked = []

    class Counted(PlayedSources):
        def slurm(self) -> SlurmPart:
            asked.append(1)
            return super().slurm()

    live = LivePicture(Counted(SlurmPart(), ControllerPart()), "played")
    live.start()
    try:
        first = live.current().number
        assert asked == []
        assert live.fresh().number == first and asked
    finally:
        live.close()


def test_change_wakes_the_watchers(live: LivePicture, sources: PlayedSources):
    with live.watching():
        first = live.fresh()
        assert isinstance(sources.slurm_part, SlurmPart)
        nodes = [
            replace(each, state=NodeState.DOWN) if each.name == "gpu-1" else each for each in sources.slurm_part.nodes
        ]
        sources.slurm_part = replace(sources.slurm_part, nodes=tuple(nodes))
        live.ask_soon()
        after = first
        while after.nodes["gpu-1"].tone is not NodeTone.DOWN:
            after = live.wait(after.number, 30)
    assert after.number > first.number


def test_silent_source_keeps_its_last_part_and_is_named(live: LivePicture, sources: PlayedSources):
    with live.watching():
        first = live.fresh()
        sources.slurm_part = SourceSilent("slurmctld does not answer")
        live.ask_soon()
        after = first
        while not after.troubles:
            after = live.wait(after.number, 30)
    assert after.troubles == (SourceTrouble("slurm", "slurmctld does not answer", silent=True),)
    assert set(after.nodes) == set(first.nodes)


def test_stream_sends_only_what_has_changed(live: LivePicture, sources: PlayedSources):
    assert isinstance(sources.slurm_part, SlurmPart)
    states = {"gpu-1": NodeState.DOWN}
    after = [replace(each, state=states.get(each.name, each.state)) for each in sources.slurm_part.nodes]

    def render(picture: ClusterPicture) -> list[PagePart]:
        """Render the picture, and take a node down for the next one."""
        sources.slurm_part = SlurmPart(tuple(after), picture.jobs)
        live.ask_soon()
        items = tuple((f"node-{name}", f"<i id=node-{name}>{each.label}</i>") for name, each in picture.nodes.items())
        return [PagePart("map", "<b id=map>", items, "</b>"), PagePart("other", "<p id=other></p>")]

    with live.watching():
        first = live.fresh()
    stream = follow(live, render, first.number)
    assert next(stream).startswith(b"event: ping")
    found = next(text for text in stream if text.startswith(b"event: update"))
    assert list(json.loads(found.partition(b"data: ")[2])["parts"]) == ["node-gpu-1"]
    stream.close()


def test_page_with_other_parts_is_loaded_again():
    a, b = PagePart("a", "<p id=a>1</p>"), PagePart("b", "<p id=b></p>")
    assert changes([a], [a, b]) is None
    assert changes([a, b], [a, b]) == {}
    assert changes([a], [replace(a, before="<p id=a>2</p>")]) == {"a": "<p id=a>2</p>"}
    old = PagePart("m", "<b id=m>", (("x", "1"), ("y", "1")), "</b>")
    assert changes([old], [replace(old, items=(("x", "1"), ("y", "2")))]) == {"y": "2"}
    assert changes([old], [replace(old, items=(("x", "1"),))]) == {"m": "<b id=m>1</b>"}


# Joining what Slurm and the controller know


@pytest.mark.parametrize(
    ("info", "phase", "presence", "tone"),
    [
        (node("n"), NodePhase.IN_SERVICE, Presence.CONNECTED, NodeTone.IDLE),
        (node("n", NodeState.ALLOCATED), NodePhase.IN_SERVICE, Presence.CONNECTED, NodeTone.BUSY),
        (node("n", NodeState.ALLOCATED), NodePhase.IN_SERVICE, Presence.GONE, NodeTone.DOWN),
        (node("n", NodeState.IDLE, NodeFlag.DRAIN), NodePhase.SPARE, Presence.CONNECTED, NodeTone.SPARE),
        (node("n", NodeState.IDLE, NodeFlag.DRAIN), NodePhase.IN_SERVICE, Presence.CONNECTED, NodeTone.DRAINED),
        (node("n", NodeState.IDLE, NodeFlag.DRAIN), NodePhase.REPAIRING, Presence.GONE, NodeTone.REPAIRING),
        (node("n", NodeState.IDLE), NodePhase.SUSPECTED, Presence.CONNECTED, NodeTone.SUSPECT),
        (node("n", NodeState.UNKNOWN), NodePhase.IN_SERVICE, Presence.NEVER, NodeTone.UNKNOWN),
    ],
)
def test_node_has_the_tone_of_its_condition(info, phase, presence, tone):
    assert tone_of(info, NodeRecoveryDetail("n", phase), AgentReport("n", presence)) is tone


def test_node_that_slurm_does_not_know_is_still_shown():
    views = node_views(SlurmPart(), ControllerPart(nodes={"n": NodeRecoveryDetail("n", NodePhase.DOWN)}))
    assert views["n"].tone is NodeTone.DOWN


def test_gpu_is_shown_with_its_job_only_if_that_is_certain():
    info = node("n", NodeState.MIXED, used=2, gpu_indexes=(3, 5))
    one, two = job(1, gpus=2), job(2, gpus=1)
    alone = gpu_views(info, AgentReport("n"), [one])
    assert [gpu.reading.index for gpu in alone if gpu.in_use] == [3, 5]
    assert alone[3].jobs == (1,) and alone[0].jobs == ()
    assert gpu_views(info, AgentReport("n"), [one, two])[3].jobs == (1, 2)


@pytest.mark.parametrize(
    ("gres", "indexes"),
    [
        ("gpu:h100:3(IDX:0-1,5)", (0, 1, 5)),
        ("gpu:h100:0(IDX:N/A)", ()),
        ("gpu:2", ()),
        ("nic:1(IDX:4),gpu:1(IDX:2)", (2,)),
        ("", ()),
    ],
)
def test_indexes_of_gpus_in_use(gres, indexes):
    assert gpu_indexes_in_gres(gres) == indexes


# Readings of GPUs


def test_readings_survive_the_wire():
    gpus = (GpuReading(0, 41.0, 512, 81920, 95.0), GpuReading(1))
    message = json.loads(json.dumps(readings_message(gpus)))
    assert parse_agent_message(message) == GpuReadings(gpus)
    assert parse_agent_message({"readings": []}) == GpuReadings(())


@pytest.mark.parametrize(
    "rows",
    [
        5,
        [1],
        [[0]],
        [[-1, 1, 1, 1, 1]],
        [[0, "x", 1, 1, 1]],
        [[0, True, 1, 1, 1]],
        [[0] * 5] * 65,
        [[0, float("nan"), 1, 1, 1]],
    ],
)
def test_malformed_readings_are_refused(rows):
    with pytest.raises(BadReport):
        parse_agent_message({"readings": rows})


def test_answer_of_another_version_is_shown_as_far_as_it_is_known():
    report = parse_agent(
        {"node": "n", "presence": "sleeping", "heard": None, "findings": [["a", "odd", "text"]], "readings": "x"}
    )
    assert report.presence is Presence.NEVER and report.gpus == ()


# History of a run


def test_history_keeps_the_whole_curve_within_its_bound(tmp_path: Path):
    writer = HistoryWriter(tmp_path / "history.json")
    for second in range(20_000):
        writer.record(second * 7.0, second, 1 + second // 9000, {"loss": 1.0 / (second + 1), "step_s": 0.1})
    assert history.MAX_POINTS / 2.5 < len(writer.points) <= history.MAX_POINTS
    assert writer.points[0].step == 0 and writer.points[-1].step > 19_900
    assert {point.generation for point in writer.points} == {1, 2, 3}
    steps = [point.step for point in writer.points]
    assert steps == sorted(steps)


def test_next_coordinator_continues_the_curve(tmp_path: Path):
    first = HistoryWriter(tmp_path / "history.json")
    first.record(1.0, 1, 1, {"loss": 5.0, "step_s": None})
    first.write(last=True)
    second = HistoryWriter(tmp_path / "history.json")
    second.record(3.0, 2, 2, {"step_s": 0.5})
    assert second.points == [StepPoint(1.0, 1, 1, 5.0, None), StepPoint(3.0, 2, 2, None, 0.5)]


@pytest.mark.parametrize(
    "value",
    [None, {}, {"points": 5}, {"points": [5, [1], ["a", 1, 1, 1, 1], [1.0, 1, 1, "x", 1], [float("inf"), 1, 1, 1, 1]]}],
)
def test_foreign_history_is_read_leniently(value):
    assert parse_history(value) == ()


# Files of users


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    folder = tmp_path / "train-aaaaa"
    folder.mkdir()
    status = RunStatus("train-aaaaa", "train", "ada", RunPhase.RUNNING, NOW, NOW)
    write_status(folder / "status.json", status)
    return RunRecord(str(folder), os.geteuid())


def test_run_is_read_from_its_folder(record: RunRecord):
    (Path(record.folder) / "journal.jsonl").write_text('{"at": 5, "event": "lost"}\nnot json\n{"at": "x"}\n[1]\n')
    view = read_run(record, kept=True)
    assert view and view.run == "train-aaaaa" and view.progress is None
    assert read_entries(record) == [{"at": 5, "event": "lost"}]
    assert read_points(record) == ()


def test_files_that_are_not_the_users_own_are_not_read(record: RunRecord, tmp_path: Path):
    folder = Path(record.folder)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (folder / "link").symlink_to(secret)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    uid = os.geteuid()
    assert [read_owned(record.folder, name, uid, 100) for name in ("link", "pipe", "folder", "none")] == [None] * 4
    (tmp_path / "elsewhere").symlink_to(folder)
    assert read_owned(str(tmp_path / "elsewhere"), "status.json", uid, 100) is None
    assert read_owned(record.folder, "status.json", uid + 1, 100) is None
    assert read_run(RunRecord(record.folder, uid + 1), kept=True) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run": 5}', "[" * 100_000])
def test_damaged_status_hides_the_run(record: RunRecord, text: str):
    (Path(record.folder) / "status.json").write_text(text)
    assert read_run(record, kept=True) is None


def test_long_journal_is_read_from_its_end(record: RunRecord):
    path = Path(record.folder) / "journal.jsonl"
    path.write_text("x" * (3 << 20) + '\n{"at": 7, "event": "ended"}\n')
    assert read_entries(record) == [{"at": 7, "event": "ended"}]


# The timeline


def test_generation_ends_with_a_failure_or_with_the_next_one():
    view = run("llama-k3f9x", "ada", 1001, ("gpu-1",))
    spans = spans_of(journal(), view.status, NOW)
    began = NOW - 7900
    assert [(span.label, span.start - began, span.end - began) for span in spans] == [
        ("1", 0, 2000), ("2", 2006, 2600), ("3", 2603, 5200), ("4", 5203, 7900),
    ]  # fmt: skip
    assert [mark.kind.value for mark in marks_of(journal())] == ["fault", "failure", "fault"]


@pytest.mark.parametrize(
    "entry",
    [
        {"at": 1.0},
        {"at": 1.0, "event": 5},
        {"at": 1.0, "event": "generation"},
        {"at": 1.0, "event": "failed", "nodes": 3},
    ],
)
def test_odd_entries_of_a_users_journal_do_no_harm(entry):
    view = run("llama-k3f9x", "ada", 1001, ("gpu-1",))
    spans_of([entry], view.status, NOW)
    marks_of([entry])
