"""A user may write anything into the files of a run. The pages of all other users must still work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.overview.gather import read_runs
from dalsegno.recovery.runs.run_records import RunRecord, RunRecords
from dalsegno.runs.folder import RunFolder
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster, Node
from dalsegno.system.files import user_of
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import Target
from dalsegno.targets.folder import ClusterFolder
from dalsegno.web.app import find_page
from dalsegno.web.data import ClusterData
from dalsegno.web.run_files import read_run
from dalsegno.web.sessions import Visitor, WebRole
from dalsegno.web.snapshot import ClusterPicture
from dalsegno.web.sources import ClusterReader
from dalsegno.web.view import PageContext

NOW = 1_794_800_000.0
DEEP = "[" * 900 + "]" * 900  # json.loads accepts it, but its text exceeds the recursion limit
HOSTILE = [
    "1e300",
    "-1e300",
    "1e308",
    "5e-324",
    "Infinity",
    "-Infinity",
    "NaN",
    "1" + "0" * 400,
    '"<b>x"',
    "null",
    DEEP,
]
SLURM = SlurmClient(LocalRunner(), {})
ROOT = Visitor(WebRole.OPERATOR, 0, "root")

STATUS = """{"run": "mal-1", "name": "mal", "user": "ada", "phase": "running", "created": X, "updated": X, "started": X,
 "ended": X, "generation": 1, "jobs": [7], "nodes": []}"""
GOOD = STATUS.replace("X", str(NOW))
PROGRESS = '{"account": {"at": X, "spent": {"productive": X, "lost": 1.0}}, "figures": {"loss": X, "step_s": X}}'
POINTS = '{"points": [[1794800000, 1, 1, 2.0, 0.1], [X, 2, 1, X, X], [1794800009, 3, 1, X, X]]}'
JOURNAL = '{"at": 1794800000, "event": "generation", "nodes": [X], "generation": X}\n' + "".join(
    f'{{"at": {at}, "event": {event}, "node": X, "why": X, "rank": X}}\n'
    for at in ("X", "1794800001")
    for event in ('"lost"', '"failed"', '"note"', "X")
)


def no_target() -> Target:
    raise DalsegnoError("no target")


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    """The state of a cluster with a hostile run and a run of another user, both ended."""
    folder = ClusterFolder(tmp_path / "state")
    folder.ended_runs.mkdir(parents=True)
    for run in ("mal-1", "good-1"):
        (tmp_path / run).mkdir()
        record = RunRecord(str(tmp_path / run), os.getuid())
        (folder.ended_runs / f"{run}.json").write_text(json.dumps(asdict(record)))
    (tmp_path / "good-1/status.json").write_text(GOOD.replace("mal-1", "good-1"))
    (tmp_path / "mal-1/status.json").write_text(GOOD)
    return folder


@pytest.fixture
def show(folder: ClusterFolder) -> Callable[[str], str]:
    """Return a function that reads all runs, and returns the HTML of a page."""
    cluster = Cluster("c", "local", (Node("n1", 1, 1, gpus=4),), ())

    def page(path: str) -> str:
        picture = ClusterPicture(at=NOW, runs=ClusterReader(folder, SLURM, no_target).runs())
        data = ClusterData(folder, SLURM, no_target, lambda: cluster)
        found = find_page(path, PageContext(picture, ROOT, data))
        return "".join(part.html for part in found.parts) if found else ""

    return page


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_status_does_not_hide_other_runs(tmp_path: Path, show: Callable[[str], str], value: str):
    for name in ("created", "updated", "started", "ended", "generation", "jobs", "nodes"):
        (tmp_path / "mal-1/status.json").write_text(json.dumps(json.loads(GOOD) | {name: 0}).replace(
            f'"{name}": 0', f'"{name}": {value}'))  # fmt: skip
        assert "good-1" in show("/runs")
        show("/goodput")
        show("/run/mal-1")


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    ("file", "text"), [("progress.json", PROGRESS), ("history.json", POINTS), ("journal.jsonl", JOURNAL)]
)
def test_hostile_figures_do_not_break_a_page(
    tmp_path: Path, show: Callable[[str], str], file: str, text: str, value: str
):
    (tmp_path / "mal-1/progress.json").write_text(PROGRESS.replace("X", "1.0"))
    (tmp_path / "mal-1" / file).write_text(text.replace("X", value))
    assert "good-1" in show("/runs") and "mal-1" in show("/goodput") + show("/runs")
    assert "<b>x" not in show("/run/mal-1")


def test_run_has_the_name_of_its_owner_whatever_its_file_says(tmp_path: Path):
    view = read_run(RunRecord(str(tmp_path / "mal-1"), os.getuid()), kept=True) if _status(tmp_path, "ada") else None
    assert view and view.status.user == user_of(os.getuid())
    (seen,) = read_runs([RunFolder(tmp_path / "mal-1")])
    assert seen.status.user == user_of(os.getuid())


def test_file_of_a_run_cannot_stand_for_another_run(tmp_path: Path):
    _status(tmp_path, "ada", folder="other-1")
    assert read_runs([RunFolder(tmp_path / "other-1")]) == []


@pytest.mark.parametrize("value", HOSTILE)
def test_status_of_the_cluster_leaves_out_a_run_with_impossible_times(tmp_path: Path, value: str):
    _status(tmp_path, "ada")
    (tmp_path / "mal-1/status.json").write_text(STATUS.replace("X", value))
    read_runs([RunFolder(tmp_path / "mal-1")], progress=True)


def test_journals_of_all_runs_are_not_read_for_every_update(folder: ClusterFolder, tmp_path: Path):
    cluster = Cluster("c", "local", (Node("n1", 1, 1, gpus=4),), ())
    data = ClusterData(folder, SLURM, lambda: None, lambda: cluster)  # type: ignore[arg-type, return-value]
    view = next(each for each in ClusterReader(folder, SLURM, no_target).runs() if each.run == "mal-1")
    before = data.gpus_of(view)
    (tmp_path / "mal-1/journal.jsonl").write_text('{"at": 1, "event": "generation", "nodes": ["n1", "n1"]}\n')
    assert data.gpus_of(view) == before


def test_ended_run_is_listed_as_soon_as_its_record_is_there(folder: ClusterFolder, tmp_path: Path):
    reader = ClusterReader(folder, SLURM, no_target)
    assert len(reader.runs()) == 2
    _status(tmp_path, "ada", folder="late-1", run="late-1")
    RunRecords(folder.ended_runs).write(RunRecord(str(tmp_path / "late-1"), os.getuid()))
    assert len(reader.runs()) == 3


def _status(tmp_path: Path, user: str, folder: str = "mal-1", run: str = "mal-1") -> Path:
    (tmp_path / folder).mkdir(exist_ok=True)
    path = tmp_path / folder / "status.json"
    path.write_text(GOOD.replace('"ada"', json.dumps(user)).replace("mal-1", run))
    return path
