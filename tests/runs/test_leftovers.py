"""Leftovers of an earlier agent of the same run are found by their environment and killed."""

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.runs.agent.agent import sweep, sweep_stale
from dalsegno.runs.agent.log_stream import LogStream


class LeftOver:
    """Leftover processes of workers."""

    def __init__(self) -> None:
        self.run = f"train-{uuid.uuid4().hex[:5]}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def leave(self, run: str, node: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "DALSEGNO_RUN": run, "SLURMD_NODENAME": node}
        self.processes.append(subprocess.Popen(["sleep", "60"], env=env, start_new_session=True))
        return self.processes[-1]


@pytest.fixture
def left() -> Iterator[LeftOver]:
    left = LeftOver()
    yield left
    for process in left.processes:
        process.kill()
        process.wait()


def test_sweep_kills_only_processes_of_this_run_on_this_node(left: LeftOver):
    ours = [left.leave(left.run, "n1") for _ in range(2)]
    others = [left.leave(left.run, "n2"), left.leave(left.run + "x", "n1"), left.leave(left.run, "n10")]
    assert sorted(sweep(left.run, "n1")) == sorted(process.pid for process in ours)
    assert [process.wait(60) for process in ours] == [-9, -9]
    assert [process.poll() for process in others] == [None] * 3


def test_snapshots_of_dead_runs_are_removed_after_a_day(left: LeftOver, tmp_path: Path):
    """Memory of live runs, and of training without a run, is kept."""
    left.leave(f"{left.run}.living", "n1")
    names = [f"{left.run}.{rest}" for rest in ("gone.0.1", "gone.3.copy0", "gone.safe", "living.0.0")]
    names += ["alone.77.0.0", "dalsegno-else"]
    for name in names:
        (tmp_path / name).touch()
    now = time.time()
    assert sweep_stale(now, tmp_path) == []
    assert sweep_stale(now + 25 * 3600, tmp_path) == [f"{left.run}.gone"]
    assert sorted(os.listdir(tmp_path)) == sorted(names[3:])


def test_sweep_without_leftovers_does_nothing(left: LeftOver):
    assert sweep(left.run, "n1") == []


def test_log_folders_of_this_run_and_node_are_removed(left: LeftOver):
    ours = LogStream(left.run, "n1")
    others = [LogStream(left.run, "n2"), LogStream(left.run + ".n1", "x"), LogStream(left.run, "n1.x")]
    sweep(left.run, "n1")
    assert not os.path.exists(ours.folder)
    assert all(os.path.isdir(other.folder) for other in others)
    for other in others:
        other.close(lambda message: False)
