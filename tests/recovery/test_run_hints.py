"""What a run's own status tells of the nodes it has left: believed of its user's job, and of nothing else."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.recovery.coordinators import RunRecord
from dalsegno.recovery.run_hints import with_hint
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


def test_a_node_that_is_to_be_mended_and_that_the_run_does_without_is_left(runs: dict[str, RunRecord]):
    assert comment(JOB, runs, "n2") == "dalsegno:main left=n2"
    assert comment(JOB, runs, "n1", "n2") == "dalsegno:main left=n2", "the other one is needed"
    assert comment(JOB, runs) == "dalsegno:main"


def test_while_a_run_restarts_nothing_is_taken_from_it(runs: dict[str, RunRecord]):
    say(runs, replace(STATUS, phase=RunPhase.RESTARTING))
    assert comment(JOB, runs, "n2") == "dalsegno:main"


def test_a_run_that_names_no_nodes_has_left_none(runs: dict[str, RunRecord]):
    """One of srun's own tasks, as MPI's: it ends with the first node that is taken from it."""
    say(runs, replace(STATUS, nodes=()))
    assert comment(JOB, runs, "n1", "n2") == "dalsegno:main"


def test_only_the_run_s_own_jobs_are_spoken_for(runs: dict[str, RunRecord]):
    assert comment(replace(JOB, id=9), runs, "n2") == "dalsegno:main", "not a job of the run"
    assert comment(replace(JOB, uid=4711), runs, "n2") == "dalsegno:main", "somebody else's"
    assert comment(replace(JOB, comment="mine"), runs, "n2") == "mine"
    assert comment(replace(JOB, name="other"), runs, "n2") == "dalsegno:main"


def test_what_a_user_puts_in_its_place_is_not_believed_and_holds_nobody_up(runs: dict[str, RunRecord], tmp_path: Path):
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
