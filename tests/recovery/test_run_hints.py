"""Tests of reading which nodes a run has left from its status: it counts only for that user's own job."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.recovery.runs.run_hints import with_hint
from dalsegno.recovery.runs.run_records import RunRecord
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase, RunStatus, write_status
from dalsegno.slurm.facts import JobInfo, JobState

ME = pwd.getpwuid(os.geteuid()).pw_name
JOB = JobInfo(7, "train-k3f9", ME, JobState.RUNNING, uid=os.geteuid(), nodes=("n1", "n2"), comment="dalsegno:main")
NODES = (RunNodeStatus("n1", NodeRole.MEMBER, 0), RunNodeStatus("n3", NodeRole.MEMBER, 1))
STATUS = RunStatus("train-k3f9", "train", ME, RunPhase.RUNNING, 1.0, 2.0, nodes=NODES, jobs=(7, 8))


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, RunRecord]:
    folder = tmp_path / "train-k3f9"
    folder.mkdir()
    write_status(RunFolder(folder).status, STATUS)
    return {"train-k3f9": RunRecord(str(folder), os.geteuid())}


def comment(job: JobInfo, runs: dict[str, RunRecord], *wanted: str) -> str:
    return with_hint(job, wanted, runs).comment


def say(runs: dict[str, RunRecord], status: RunStatus) -> None:
    write_status(RunFolder(Path(runs["train-k3f9"].folder)).status, status)


def test_a_node_that_needs_repair_and_that_the_run_does_not_use_is_left(runs: dict[str, RunRecord]):
    assert comment(JOB, runs, "n2") == "dalsegno:main left=n2"
    assert comment(JOB, runs, "n1", "n2") == "dalsegno:main left=n2", "the run still uses the other one"
    assert comment(JOB, runs) == "dalsegno:main"


def test_no_node_is_left_while_the_run_restarts(runs: dict[str, RunRecord]):
    say(runs, replace(STATUS, phase=RunPhase.RESTARTING))
    assert comment(JOB, runs, "n2") == "dalsegno:main"


def test_a_run_that_lists_no_nodes_has_left_none(runs: dict[str, RunRecord]):
    """A run of srun's own tasks, such as MPI, ends with the first node that is removed from it."""
    say(runs, replace(STATUS, nodes=()))
    assert comment(JOB, runs, "n1", "n2") == "dalsegno:main"


def test_the_status_counts_only_for_jobs_of_the_run(runs: dict[str, RunRecord]):
    assert comment(replace(JOB, id=9), runs, "n2") == "dalsegno:main", "not a job of the run"
    assert comment(replace(JOB, uid=4711), runs, "n2") == "dalsegno:main", "a job of another user"
    assert comment(replace(JOB, comment="mine"), runs, "n2") == "mine"
    assert comment(replace(JOB, name="other"), runs, "n2") == "dalsegno:main"


def test_a_manipulated_status_file_is_ignored_and_does_not_block(runs: dict[str, RunRecord], tmp_path: Path):
    path = RunFolder(Path(runs["train-k3f9"].folder)).status
    good = path.read_text()
    for text in ("", "[]", "{", '{"nodes": 3}', good.replace('"n1"', "17"), "[" * 100_000):
        path.write_text(text)
        assert comment(JOB, runs, "n2") == "dalsegno:main"
    path.unlink()
    os.mkfifo(path)
    assert comment(JOB, runs, "n2") == "dalsegno:main"
    path.unlink()
    (tmp_path / "elsewhere").write_text(good)
    path.symlink_to(tmp_path / "elsewhere")
    assert comment(JOB, runs, "n2") == "dalsegno:main"
    path.unlink()
    path.write_text(good)
    assert comment(JOB, {"train-k3f9": RunRecord(runs["train-k3f9"].folder, 4711)}, "n2") == "dalsegno:main"
