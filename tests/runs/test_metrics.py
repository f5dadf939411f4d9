"""Tests of the metrics of runs, whose files belong to users and may hold anything."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.observe.exposition import Family, render
from dalsegno.runs import journal
from dalsegno.runs.coordinator.agents.messages import Stepped, read_message
from dalsegno.runs.coordinator.reports.goodput import Goodput, ProgressWriter, TimeKind, TrainingProgress, compare_ranks
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.journal import RunEvent
from dalsegno.runs.metrics import KEPT_S, KnownRun, ResumeTimes, RunMetrics
from dalsegno.runs.status import RunPhase, RunStatus
from dalsegno.runs.user_files import MAX_FILE_BYTES, MAX_JOURNAL_BYTES, JournalTail
from dalsegno.spec.facts import facts_to_json
from dalsegno.system.files import user_of

NOW = 1_700_000_000.0
STATUS = RunStatus(
    "r1", "llama", "somebody", RunPhase.RUNNING, NOW - 900, NOW, generation=2, restarts=1, lost_nodes=3,
    world_size=8, jobs=(17, 18),
)  # fmt: skip
SPENT = {TimeKind.PRODUCTIVE: 90.0, TimeKind.LOST: 10.0}
FIGURES = {"loss": 2.5, "step_s": 0.25, "samples_per_s": 16.0, "tokens_per_s": 4096.0}
PROGRESS = TrainingProgress(Goodput(NOW, SPENT, step=120), FIGURES, NOW - 1.5, {"0": 1.0, "7": 1.8})
ME = os.geteuid()
OWN = f'run="r1",user="{user_of(ME)}"'


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def make_run(root: Path, status: object = None, progress: object = None, name: str = "r1") -> RunFolder:
    folder = RunFolder(root / name)
    folder.root.mkdir(exist_ok=True)
    folder.status.write_text(json.dumps(facts_to_json(STATUS) if status is None else status))
    folder.progress.write_text(json.dumps(facts_to_json(PROGRESS) if progress is None else progress))
    return folder


def source(*folders: RunFolder, uid: int = ME, clock: Clock | None = None) -> RunMetrics:
    return RunMetrics(lambda: [KnownRun(folder.root, uid) for folder in folders], clock or Clock())


def samples(families: Iterable[Family]) -> dict[str, float]:
    lines = [line for line in render(families).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def training(families: Iterable[Family]) -> dict[str, float]:
    return {name: value for name, value in samples(families).items() if name.startswith("training_")}


def test_a_run_shows_all_its_metrics(tmp_path: Path):
    assert training(source(make_run(tmp_path)).collect()) == {
        f'training_run_info{{{OWN},name="llama",phase="running",job_id="17"}}': 1,
        f"training_step{{{OWN}}}": 120,
        f"training_step_seconds{{{OWN}}}": 0.25,
        f"training_loss{{{OWN}}}": 2.5,
        f"training_samples_per_second{{{OWN}}}": 128,
        f"training_tokens_per_second{{{OWN}}}": 32768,
        f"training_goodput_ratio{{{OWN}}}": 0.9,
        f"training_last_step_timestamp_seconds{{{OWN}}}": NOW - 1.5,
        f"training_generation{{{OWN}}}": 2,
        f"training_restarts_total{{{OWN}}}": 1,
        f"training_lost_nodes_total{{{OWN}}}": 3,
        **{f'training_time_seconds_total{{{OWN},kind="{kind.value}"}}': SPENT.get(kind, 0.0) for kind in TimeKind},
        **{
            f'training_badput_seconds_total{{{OWN},reason="{kind.value}"}}': SPENT.get(kind, 0.0)
            for kind in TimeKind
            if kind is not TimeKind.PRODUCTIVE
        },
        f'training_rank_step_ratio{{{OWN},rank="0"}}': 1,
        f'training_rank_step_ratio{{{OWN},rank="7"}}': 1.8,
    }


def test_a_script_that_reports_nothing_has_only_its_state(tmp_path: Path):
    folder = make_run(tmp_path)
    folder.progress.unlink()
    names = {name.partition("{")[0] for name in training(source(folder).collect())}
    assert names == {
        "training_run_info", "training_generation", "training_restarts_total", "training_lost_nodes_total",
    }  # fmt: skip


def test_a_run_is_shown_until_ten_minutes_after_its_end(tmp_path: Path):
    ended = facts_to_json(replace(STATUS, phase=RunPhase.ENDED, ended=NOW - 10, jobs=()))
    folder, clock = make_run(tmp_path, ended), Clock()
    known = [KnownRun(folder.root, ME)]
    runs = RunMetrics(lambda: known, clock)
    runs.collect()
    known.clear()  # the controller forgets the run at once
    clock.now += KEPT_S - 20
    assert f'training_run_info{{{OWN},name="llama",phase="ended",job_id=""}}' in training(runs.collect())
    clock.now += 20
    assert training(runs.collect()) == {}
    assert runs._watched == {}


def test_a_run_that_another_controller_forgot_is_dropped(tmp_path: Path):
    clock = Clock()
    known = [KnownRun(make_run(tmp_path).root, ME)]
    runs = RunMetrics(lambda: known, clock)
    runs.collect()
    known.clear()
    clock.now += KEPT_S + 1
    assert training(runs.collect()) == {}


HUGE = 10**4000
BAD_VALUES: list[dict[str, Any]] = [
    {"figures": {"loss": float("nan"), "step_s": float("inf"), "samples_per_s": 1e300, "tokens_per_s": -1e300}},
    {"figures": {"loss": HUGE}},
    {"figures": []},
    {"ranks": {"0": float("nan"), '"} 1\nforged': 2.0, "-1": 1.0, "99999999": 1.0}},
    {"ranks": {"1": HUGE}},
    {"account": {"at": float("nan"), "spent": {"productive": float("inf"), "lost": -5.0}, "step": HUGE}},
    {"account": {"at": 1.0, "spent": {"strange": 5.0}}},
    {"account": None},
    {"stepped_at": -1e308},
]


@pytest.mark.parametrize("bad", BAD_VALUES, ids=str)
def test_hostile_progress_breaks_neither_the_scrape_nor_other_runs(tmp_path: Path, bad: dict[str, Any]):
    good = make_run(tmp_path, name="good")
    hostile = make_run(tmp_path, progress={**facts_to_json(PROGRESS), **bad})
    text = render(source(hostile, good).collect()).decode()
    found = samples(source(hostile, good).collect())
    assert "NaN" not in text and not any(line.startswith("forged") for line in text.splitlines())
    assert all(abs(value) < 1e17 for name, value in found.items())
    assert found[f'training_step{{run="good",user="{user_of(ME)}"}}'] == 120
    assert not any('rank="-1"' in name or 'rank="99999999"' in name for name in found)


@pytest.mark.parametrize(
    "bad",
    [
        {"name": 'x"} 1\ntraining_loss{run="forged'},
        {"name": "x" * 5000},
        {"generation": HUGE, "world_size": HUGE, "jobs": [HUGE]},
        {"ended": HUGE, "phase": "ended"},
        {"phase": "a new phase"},
        {"nodes": "none"},
        {"jobs": [-1]},
    ],
    ids=lambda bad: str(bad)[:40],
)
def test_a_hostile_status_cannot_forge_a_sample(tmp_path: Path, bad: dict[str, Any]):
    good = make_run(tmp_path, name="good")
    runs = source(make_run(tmp_path, {**facts_to_json(STATUS), **bad}), good)
    lines = [line for line in render(runs.collect()).decode().splitlines() if not line.startswith("#")]
    assert not any(line.startswith('training_loss{run="forged') for line in lines)
    assert all(len(line) < 700 for line in lines)
    assert sum('run="good"' in line for line in lines) == 22


def test_files_that_are_not_json_too_long_or_missing_hide_only_the_run(tmp_path: Path):
    for text in ("", "[", "[" * 100_000, "[1]", "1" * 5000, " " * (MAX_FILE_BYTES + 1)):
        folder = make_run(tmp_path)
        folder.status.write_text(text)
        assert training(source(folder).collect()) == {}
    assert training(source(RunFolder(tmp_path / "none")).collect()) == {}


def test_only_regular_files_of_the_owner_are_read(tmp_path: Path):
    folder = make_run(tmp_path)
    assert training(source(folder, uid=ME + 1).collect()) == {}
    secret = tmp_path / "secret"
    folder.status.rename(secret)
    folder.status.symlink_to(secret)
    assert training(source(folder).collect()) == {}
    folder.status.unlink()
    os.mkfifo(folder.status)  # a reader must not wait for a writer
    assert training(source(folder).collect()) == {}


def test_the_name_of_a_run_is_the_first_one_it_had(tmp_path: Path):
    folder = make_run(tmp_path)
    runs = source(folder)
    runs.collect()
    folder.status.write_text(json.dumps(facts_to_json(replace(STATUS, name="another", generation=3))))
    found = training(runs.collect())
    assert f'training_run_info{{{OWN},name="llama",phase="running",job_id="17"}}' in found
    assert found[f"training_generation{{{OWN}}}"] == 3


def test_time_to_resume_is_from_the_lost_node_to_the_next_step(tmp_path: Path):
    folder = make_run(tmp_path)
    runs = source(folder)
    journal.append(folder.journal, 100.0, RunEvent.FIRST_STEP, generation=1, step=1)
    journal.append(folder.journal, 200.0, RunEvent.LOST, node="a", was="spare")
    journal.append(folder.journal, 300.0, RunEvent.LOST, node="b", was="member")
    assert samples(runs.collect())["dalsegno_recovery_resume_seconds_count"] == 0
    journal.append(folder.journal, 301.0, RunEvent.LOST, node="c", was="member")
    journal.append(folder.journal, 304.5, RunEvent.FIRST_STEP, generation=2, step=90)
    found = samples(runs.collect())
    assert found["dalsegno_recovery_resume_seconds_count"] == 1
    assert found["dalsegno_recovery_resume_seconds_sum"] == 4.5
    assert samples(runs.collect())["dalsegno_recovery_resume_seconds_count"] == 1


def test_hostile_journals_are_bounded():
    times = ResumeTimes()
    times.add("r", [{"at": 9e10, "event": RunEvent.LOST, "was": "member"}, {"at": 1.0, "event": RunEvent.FIRST_STEP}])
    times.add("r", [{"at": 1.0, "event": ["lost"], "was": {}}])
    assert times.histogram.total == 0
    pair = [{"at": 1.0, "event": RunEvent.LOST, "was": "member"}, {"at": 2.0, "event": RunEvent.FIRST_STEP}]
    times.add("r", pair * 1000)
    assert times.histogram.total == 100


def test_a_journal_is_read_in_pieces_and_from_its_end_if_it_is_long(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    tail = JournalTail(path, ME)
    assert tail.read_new() == []
    path.write_text('{"at": 1.0, "event": "a"}\n{"at": 2.0, "ev')
    assert [entry["at"] for entry in tail.read_new()] == [1.0]
    with path.open("a") as file:
        file.write(f'ent": "b"}}\n{{"at": {HUGE}}}\n{{"at": NaN}}\nnothing\n')
    assert [entry["at"] for entry in tail.read_new()] == [2.0]
    path.write_text("x" * (2 * MAX_JOURNAL_BYTES) + '\n{"at": 3.0, "event": "c"}\n')
    assert [entry["at"] for entry in JournalTail(path, ME).read_new()] == [3.0]
    path.write_text('{"at": 4.0, "event": "d"}\n')
    assert [entry["at"] for entry in tail.read_new()] == [4.0]  # a shorter file must be another file


def test_ranks_are_compared_with_their_median():
    assert compare_ranks({}) == compare_ranks({0: 0.0}) == {}
    assert compare_ranks({2: 0.3, 0: 0.1, 1: 0.1}) == {"0": 1.0, "1": 1.0, "2": 3.0}
    many = compare_ranks({rank: 1.0 + rank for rank in range(1000)})
    assert len(many) == 256 and "999" in many and "0" not in many


def test_busy_times_of_all_nodes_reach_the_progress_file(tmp_path: Path):
    writer = ProgressWriter(tmp_path / "progress.json")
    message = read_message({"step": 7, "generation": 1, "busy": {"0": 0.1, "1": 0.1}, "progress": {"loss": 1.0}})
    assert isinstance(message, Stepped)
    before = time.time()
    writer.record_step(message)
    writer.record_step(Stepped(1, 7, busy_s={2: 0.25}))
    writer.write()
    found = json.loads((tmp_path / "progress.json").read_text())
    assert found["ranks"] == {"0": 1.0, "1": 1.0, "2": 2.5}
    assert found["stepped_at"] >= before
