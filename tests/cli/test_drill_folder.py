"""A drill removes its folder when it ends, and the folders of drills that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from dalsegno.cli.health.drill_traces import clear_leftovers, drill_folder
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.submit.plan import plan_run
from dalsegno.runs.submit.prepare import first_status, prepare_run
from tests.cli.runs import end
from tests.submit.runs import FOREIGN, asked
from tests.waiting import eventually

SOURCE = Path(__file__).parents[2] / "src"
DRILLS = """
import sys, time
from pathlib import Path
from dalsegno.cli.health.drill_traces import drill_folder
with drill_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(1000)
"""


def trains_in(folder: Path, home: Path) -> RunFolder:
    plan = plan_run(asked(chdir=str(folder / "disturbed")), replace(FOREIGN, runs_folder=str(home)), "drill-k3f9x")
    return prepare_run(plan, {}, first_status(plan, "ada", time.time()), home)


def test_drill_folder_is_removed_afterwards(tmp_path: Path):
    with drill_folder(tmp_path / "runs") as folder:
        (folder / "notes").write_text("step")
    assert list((tmp_path / "runs").iterdir()) == []


def test_folder_of_a_live_drill_is_kept_and_that_of_a_killed_one_is_removed(tmp_path: Path):
    argv = [sys.executable, "-c", DRILLS, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as drill:
        try:
            assert drill.stdout is not None
            folder = Path(drill.stdout.readline().strip())
            clear_leftovers(tmp_path)
            assert folder.is_dir()
        finally:
            drill.kill()
    assert folder.is_dir()
    eventually(lambda: (clear_leftovers(tmp_path), not folder.exists())[1])


def test_folder_is_kept_while_a_run_trains_in_it(tmp_path: Path):
    folder = tmp_path / ".drill-dead"
    folder.mkdir()
    run = trains_in(folder, tmp_path)
    clear_leftovers(tmp_path)
    assert folder.is_dir()
    ended: list[RunFolder] = []
    clear_leftovers(tmp_path, ended.append)
    assert ended == [run] and not folder.exists()


def test_folder_of_an_ended_run_is_removed(tmp_path: Path):
    folder = tmp_path / ".drill-dead"
    folder.mkdir()
    end(trains_in(folder, tmp_path))
    clear_leftovers(tmp_path)
    assert not folder.exists()
