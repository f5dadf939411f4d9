"""While a run has no coordinator, Slurm's queue tells of it; and nobody waits for ever for one that is gone."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.cli.watch import RunLost, RunWatch, coordinator_is_dead, is_over, job_ids, jobs_of
from dalsegno.errors import DalsegnoError
from dalsegno.runs import journal
from dalsegno.runs.status import RunPhase
from dalsegno.slurm.facts import JobInfo, JobState
from tests.cli.runs import end, make_run, status, tell


class Answers:
    """A queue that gives its answers one after the other, the last one for ever."""

    def __init__(self, *answers: list[JobInfo] | DalsegnoError) -> None:
        self.left = list(answers)
        self.asked = 0

    def jobs(self) -> list[JobInfo]:
        self.asked += 1
        answer = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if isinstance(answer, DalsegnoError):
            raise answer
        return answer


def job(state: JobState, name: str = "train-k3f9x", reason: str = "") -> JobInfo:
    return JobInfo(12, name, "ada", state, uid=os.geteuid(), reason=reason)


def watching(run_at: Path, *answers: list[JobInfo] | DalsegnoError, on_head: bool = False) -> tuple[RunWatch, Answers]:
    queue = Answers(*answers)
    return RunWatch(make_run(run_at, on_head=on_head), queue, on_head=on_head, answers=lambda: False), queue


def test_a_run_in_the_queue_says_what_it_waits_for(tmp_path: Path) -> None:
    waits, has_nodes = [job(JobState.PENDING, reason="Priority")], [job(JobState.RUNNING)]
    watch, _ = watching(tmp_path, waits, has_nodes)
    assert (watch.look(101.0).phase, watch.look(101.0).message) == (RunPhase.WAITING, "Priority (job 12)")
    assert (watch.look(110.0).phase, watch.look(110.0).message) == (RunPhase.STARTING, "job 12 has its nodes")


def test_slurm_is_not_asked_at_every_look(tmp_path: Path) -> None:
    watch, queue = watching(tmp_path, [job(JobState.PENDING)])
    for tenth in range(20):
        watch.look(101.0 + tenth / 10)
    assert queue.asked == 1


def test_a_coordinator_that_speaks_is_believed(tmp_path: Path) -> None:
    watch, queue = watching(tmp_path, [])
    run = make_run(tmp_path, "other-00000")
    watch = RunWatch(run, queue, on_head=False, answers=lambda: False)
    tell(run, coordinator_pid=7, updated=200.0, message="")
    assert watch.look(201.0) == status(run="other-00000", coordinator_pid=7, updated=200.0)
    tell(run, coordinator_pid=7, updated=200.0, phase=RunPhase.ENDED)
    assert not is_over(watch.look(201.0)), "it says that it ends, and clears up"
    end(run, 3)
    assert is_over(watch.look(9999.0))
    assert queue.asked == 0


def test_why_a_job_waits_only_slurm_knows(tmp_path: Path) -> None:
    run = make_run(tmp_path, on_head=True)
    queue = Answers([job(JobState.PENDING, reason="Resources")], [job(JobState.RUNNING)], [])
    watch = RunWatch(run, queue, on_head=True, answers=lambda: True)
    tell(run, phase=RunPhase.WAITING, coordinator_pid=7, updated=200.0)
    assert watch.look(201.0).message == "Resources (job 12)"
    assert [(watch.look(now).phase, watch.look(now).message) for now in (205.0, 209.0)] == [(RunPhase.WAITING, "")] * 2
    assert watch.look(999.0).phase is RunPhase.WAITING, "no job at all: its coordinator asks for one again"


def test_a_run_whose_jobs_are_gone_is_lost(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path, [job(JobState.RUNNING)], [job(JobState.FAILED), job(JobState.RUNNING, name="other")])
    watch.look(101.0)
    watch.look(104.0)
    with pytest.raises(RunLost, match=r"no job of run train-k3f9x is left"):
        watch.look(110.0)


def test_a_job_that_comes_back_is_not_lost(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path, [], [job(JobState.PENDING)], [])
    for now in (101.0, 104.0, 110.0):
        watch.look(now)


def test_a_slurm_that_does_not_answer_says_nothing_about_the_run(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path, DalsegnoError("slurmctld is down"))
    assert [watch.look(now).phase for now in (101.0, 120.0, 600.0)] == [RunPhase.WAITING] * 3


def test_a_controller_that_starts_nothing_is_not_waited_for(tmp_path: Path) -> None:
    watch, queue = watching(tmp_path, [], on_head=True)
    assert watch.look(130.0).phase is RunPhase.WAITING
    with pytest.raises(RunLost, match="the cluster's controller does not answer"):
        watch.look(170.0)
    assert queue.asked == 0


def test_a_folder_that_is_gone_is_a_run_that_is_lost(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path, [])
    (tmp_path / "train-k3f9x" / "status.json").unlink()
    with pytest.raises(RunLost, match="is gone"):
        watch.look(101.0)


def test_a_run_whose_cluster_was_taken_down_is_lost_unless_its_end_is_written_down(tmp_path: Path) -> None:
    run = make_run(tmp_path, on_head=True)
    watch = RunWatch(run, Answers([]), on_head=True, answers=lambda: True, no_cluster=lambda: True)
    tell(run, coordinator_pid=7, updated=200.0)
    watch.look(200.5)
    with pytest.raises(RunLost, match="run train-k3f9x is lost: its cluster is gone"):
        watch.look(203.0)
    end(run, 143)
    assert is_over(watch.look(204.0))


def test_jobs_are_those_in_the_status_else_those_handed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert job_ids(run, status()) == []
    journal.append(run.journal, 1.0, "submitted", job=12)
    assert job_ids(run, status()) == [12]
    assert job_ids(run, status(jobs=(14, 15))) == [14, 15]


def names(jobs: Iterable[JobInfo]) -> list[str]:
    return [each.name for each in jobs]


def test_jobs_of_a_run_bear_its_name_and_are_not_over(tmp_path: Path) -> None:
    known = [job(JobState.COMPLETING), job(JobState.CANCELLED), job(JobState.RUNNING, name="train-k3f9")]
    assert names(jobs_of(make_run(tmp_path), known)) == ["train-k3f9x"]


def test_a_job_of_another_user_with_the_name_of_a_run_is_not_the_run_s(tmp_path: Path) -> None:
    assert jobs_of(make_run(tmp_path), [replace(job(JobState.RUNNING), uid=4711)]) == []


def test_a_dead_coordinator_is_only_known_on_its_own_host() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    here = socket.gethostname()
    assert coordinator_is_dead(status(coordinator_pid=child.pid, coordinator_host=here))
    assert not coordinator_is_dead(status(coordinator_pid=os.getpid(), coordinator_host=here))
    assert not coordinator_is_dead(status(coordinator_pid=child.pid, coordinator_host="elsewhere"))
    assert not coordinator_is_dead(status())
