"""Tests of freeing shared memory of runs that ended on a node, but not of runs that may come back."""

from __future__ import annotations

import mmap
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.node_agent.evidence import EVERY_S, UNUSED_S, SharedMemorySweeper

OLD = 1_000_000_000.0  # long ago
UID = os.getuid()


@pytest.fixture
def run() -> str:
    return f"gpt-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def agent(run: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"], env={"DALSEGNO_RUN": run, "PATH": os.environ["PATH"]}) as process:
        yield process
        process.kill()


def leave(shm: Path, *names: str, at: float = OLD, uid: int = UID) -> None:
    folder = shm / f"dalsegno.{uid}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        (folder / name).touch()
        os.utime(folder / name, (at, at))
    if uid != UID:
        os.chown(folder, uid, uid)


def test_unused_memory_is_freed_after_a_grace_period(tmp_path: Path, run: str):
    leave(tmp_path, f"{run}.safe", f"{run}.0.1", f"{run}.3.copy0", "other")
    memory = SharedMemorySweeper(tmp_path)
    assert memory.tidy(0.0) == [] and memory.tidy(UNUSED_S - 1) == []
    assert memory.tidy(UNUSED_S - 1 + EVERY_S) == [(UID, run)]
    assert os.listdir(tmp_path / f"dalsegno.{UID}") == ["other"]


@pytest.mark.skipif(UID != 0, reason="only root can make a file of somebody else's")
def test_without_root_the_memory_of_other_users_is_kept(tmp_path: Path, run: str):
    leave(tmp_path, f"{run}.safe")
    leave(tmp_path, "theirs.safe", uid=4711)
    memory = SharedMemorySweeper(tmp_path, uid=4711)
    memory.tidy(0.0)
    assert memory.tidy(UNUSED_S) == [(4711, "theirs")]
    assert os.listdir(tmp_path) == [f"dalsegno.{UID}"], "an empty folder is removed too"


def test_memory_is_kept_while_a_process_of_the_run_lives_or_just_ended(
    tmp_path: Path, run: str, agent: subprocess.Popen[bytes]
):
    leave(tmp_path, f"{run}.safe")
    memory = SharedMemorySweeper(tmp_path)
    assert memory.tidy(0.0) == memory.tidy(1000.0) == []
    agent.kill()
    agent.wait()
    assert memory.tidy(2000.0) == [], "the grace period starts when the process is first missed"
    assert memory.tidy(2000.0 + UNUSED_S) == [(UID, run)]


def test_a_new_agent_is_recognized_by_its_arguments(tmp_path: Path, run: str):
    leave(tmp_path, f"{run}.safe")
    with subprocess.Popen(["sh", "-c", "read answer; exit", "run-agent", run], stdin=subprocess.PIPE) as process:
        memory = SharedMemorySweeper(tmp_path)
        assert memory.tidy(0.0) == memory.tidy(1000.0) == []
        process.kill()


def test_recent_files_and_files_of_no_run_are_kept(tmp_path: Path, run: str):
    leave(tmp_path, f"{run}.safe", at=4_000_000_000.0)
    leave(tmp_path, "alone.77.0.0", "x", "dalsegno")
    (tmp_path / f"{run}.safe").touch()
    memory = SharedMemorySweeper(tmp_path)
    assert memory.tidy(0.0) == memory.tidy(1000.0) == []
    assert len(os.listdir(tmp_path)) == 2 and len(os.listdir(tmp_path / f"dalsegno.{UID}")) == 4


def test_the_folder_is_searched_at_intervals(tmp_path: Path, run: str):
    memory = SharedMemorySweeper(tmp_path)
    memory.tidy(0.0)
    leave(tmp_path, f"{run}.safe")
    assert memory.tidy(EVERY_S - 1) == memory.tidy(EVERY_S) == []
    assert memory.tidy(EVERY_S + UNUSED_S) == [(UID, run)]


def test_missing_folder_is_not_an_error(tmp_path: Path):
    assert SharedMemorySweeper(tmp_path / "none").tidy(0.0) == []


def test_memory_mapped_by_an_unmarked_process_is_kept(tmp_path: Path, run: str):
    leave(tmp_path, f"{run}.0.1")
    memory = SharedMemorySweeper(tmp_path)
    with (tmp_path / f"dalsegno.{UID}" / f"{run}.0.1").open("r+b") as file:
        file.truncate(4096)
        os.utime(file.fileno(), (OLD, OLD))
        with mmap.mmap(file.fileno(), 4096):
            assert memory.tidy(0.0) == memory.tidy(UNUSED_S) == []
    assert memory.tidy(2 * UNUSED_S) == [(UID, run)]
