"""Tests of the lanes: every test runs once, and a failure in any lane fails the suite."""

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lanes import ALL_ON_CLUSTER, pytest_ignore_collect, taken

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Item:
    path: Path
    name: str


def test_each_file_is_run_by_one_lane(tmp_path: Path):
    items = [Item(Path(f"/tests/{folder}/test_{file}.py"), name) for folder in "ab" for file in "xyz" for name in "12"]
    in_turn = list(zip_longest(taken(items, tmp_path), taken(items, tmp_path)))
    first, second = ([each for each in lane if each] for lane in zip(*in_turn, strict=True))
    assert sorted([*first, *second], key=items.index) == items
    assert first and second and not {item.path for item in first} & {item.path for item in second}


def ignored(path: Path, which: str, half: int | None = None) -> bool:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=which, half=half))
    return bool(pytest_ignore_collect(path, config))


def test_each_folder_is_in_one_half():
    folders = [path for path in (ROOT / "tests").iterdir() if path.name != "cluster"]
    halves = [[path for path in folders if not ignored(path, "", half)] for half in (1, 2)]
    assert all(halves) and sorted(halves[0] + halves[1]) == sorted(folders)


def test_only_files_without_a_selected_test_are_skipped(tmp_path: Path):
    texts = {
        "all": "pytestmark = [\n    pytest.mark.cluster,\n]\n",
        "some": "@pytest.mark.cluster\ndef test_it(): ...\n",
        "measured": "@pytest.mark.cluster\n@pytest.mark.alone\ndef test_it(): ...\n",
        "none": "def test_it(): ...\n",
    }
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    expected = {
        "not cluster and not long": {"all"},
        "cluster and not alone": {"none"},
        "cluster and alone": {"all", "some", "none"},
        "": set(),
    }
    for which, skipped in expected.items():
        assert {name for name in texts if ignored(tmp_path / f"test_{name}.py", which)} == skipped
    assert ignored(ROOT / "tests/cluster", "not cluster") and not ignored(ROOT / "tests/cluster", "cluster")


def test_files_that_match_the_cluster_mark_have_it_as_a_statement():
    for path in (ROOT / "tests").rglob("test_*.py"):
        if ALL_ON_CLUSTER.search(text := path.read_text()):
            names = [ast.unparse(each.targets[0]) for each in ast.parse(text).body if isinstance(each, ast.Assign)]
            assert "pytestmark" in names, f"{path}: the line is in another text"


@pytest.mark.cluster  # many processes or connections: too slow for the unit part
@pytest.mark.parametrize(("word", "code"), [("True", 0), ("False", 1)])
def test_every_test_runs_once_and_a_failure_fails_the_suite(tmp_path: Path, word: str, code: int):
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npython_functions = try_*\nmarkers = waits\n"
    )  # the settings of our own test suite
    for name in "abcd":
        mark = "@pytest.mark.waits\n" if name == "c" else ""
        body = f"    open({str(tmp_path / name)!r}, 'x')\n    assert {word if name == 'd' else True}\n"
        text = f"import pytest\n{mark}def try_it():\n{body}"
        (tmp_path / f"test_{name}.py").write_text(text)
    argv = [sys.executable, "-m", "tests.lanes", "not cluster", "--lanes", "3", "--beside", "waits", "-v"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds to load
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert all((tmp_path / name).exists() for name in "abcd")
    assert (done.stdout.count(" PASSED"), done.stdout.count("::try_it FAILED")) == (4 - code, code), done.stdout
