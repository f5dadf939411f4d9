"""Tests of watching a run: Slurm's queue shows a run without coordinator, and a lost run is detected."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.cli.training.watch import RunLost, RunWatch, job_ids, jobs_of
from dalsegno.errors import DalsegnoError
from dalsegno.runs import journal
from dalsegno.runs.status import RunPhase, coordinator_is_dead, is_over
from dalsegno.slurm.facts import JobInfo, JobState
from tests.cli.runs import end, make_run, status, tell


class Answers:
    """A queue that returns its answers one after the other and then repeats the last one."""

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


def test_pending_run_shows_slurm_reason(tmp_path: Path) -> None:
    waits, has_nodes = [job(JobState.PENDING, reason="Priority")], [job(JobState.RUNNING)]
    watch, _ = watching(tmp_path, waits, has_nodes)
    assert (watch.poll(101.0).phase, watch.poll(101.0).message) == (RunPhase.WAITING, "Priority (job 12)")
    assert (watch.poll(110.0).phase, watch.poll(110.0).message) == (RunPhase.STARTING, "job 12 has its nodes")


def test_slurm_is_not_queried_at_every_poll(tmp_path: Path) -> None:
    watch, queue = watching(tmp_path, [job(JobState.PENDING)])
    for tenth in range(20):
        watch.poll(101.0 + tenth / 10)
    assert queue.asked == 1


def test_recent_coordinator_status_needs_no_query(tmp_path: Path) -> None:
    watch, queue = watching(tmp_path, [])
    run = make_run(tmp_path, "other-00000")
    watch = RunWatch(run, queue, on_head=False, answers=lambda: False)
    tell(run, coordinator_pid=7, updated=200.0, message="")
    assert watch.poll(201.0) == status(run="other-00000", coordinator_pid=7, updated=200.0)
    tell(run, coordinator_pid=7, updated=200.0, phase=RunPhase.ENDED)
    assert not is_over(watch.poll(201.0)), "it has reported its end and still cleans up"
    end(run, 3)
    assert is_over(watch.poll(9999.0))
    assert queue.asked == 0


def test_reason_of_waiting_run_comes_from_slurm(tmp_path: Path) -> None:
    run = make_run(tmp_path, on_head=True)
    queue = Answers([job(JobState.PENDING, reason="Resources")], [job(JobState.RUNNING)], [])
    watch = RunWatch(run, queue, on_head=True, answers=lambda: True)
    tell(run, phase=RunPhase.WAITING, coordinator_pid=7, updated=200.0)
    assert watch.poll(201.0).message == "Resources (job 12)"
    assert [(watch.poll(now).phase, watch.poll(now).message) for now in (205.0, 209.0)] == [(RunPhase.WAITING, "")] * 2
    assert watch.poll(999.0).phase is RunPhase.WAITING, "no job: its coordinator requests another"


def test_run_without_jobs_is_lost(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path, [job(JobState.RUNNING)], [job(JobState.FAILED), job(JobState.RUNNING, name="other")])
    watch.poll(101.0)
    watch.poll(104.0)
    with pytest.raises(RunLost, match=r"no job of run train-k3f9x is left"):
        watch.poll(110.0)


def test_run_with_requeued_job_is_not_lost(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path, [], [job(JobState.PENDING)], [])
    for now in (101.0, 104.0, 110.0):
        watch.poll(now)


def test_run_is_not_lost_while_slurm_does_not_answer(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path, DalsegnoError("slurmctld is down"))
    assert [watch.poll(now).phase for now in (101.0, 120.0, 600.0)] == [RunPhase.WAITING] * 3


def test_run_is_lost_if_controller_starts_no_coordinator(tmp_path: Path) -> None:
    watch, queue = watching(tmp_path, [], on_head=True)
    assert watch.poll(130.0).phase is RunPhase.WAITING
    with pytest.raises(RunLost, match="the cluster's controller does not answer"):
        watch.poll(170.0)
    assert queue.asked == 0


def test_run_with_removed_folder_is_lost(tmp_path: Path) -> None:
    watch, _ = watching(tmp_path, [])
    (tmp_path / "train-k3f9x" / "status.json").unlink()
    with pytest.raises(RunLost, match="is gone"):
        watch.poll(101.0)


def test_run_of_removed_cluster_is_lost_unless_it_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path, on_head=True)
    watch = RunWatch(run, Answers([]), on_head=True, answers=lambda: True, no_cluster=lambda: True)
    tell(run, coordinator_pid=7, updated=200.0)
    watch.poll(200.5)
    with pytest.raises(RunLost, match="run train-k3f9x is lost: its cluster is gone"):
        watch.poll(203.0)
    end(run, 143)
    assert is_over(watch.poll(204.0))


def test_job_ids_come_from_status_else_from_journal(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert job_ids(run, status()) == []
    journal.append(run.journal, 1.0, "submitted", job=12)
    assert job_ids(run, status()) == [12]
    assert job_ids(run, status(jobs=(14, 15))) == [14, 15]


def names(jobs: Iterable[JobInfo]) -> list[str]:
    return [each.name for each in jobs]


def test_jobs_of_a_run_have_its_name_and_have_not_ended(tmp_path: Path) -> None:
    known = [job(JobState.COMPLETING), job(JobState.CANCELLED), job(JobState.RUNNING, name="train-k3f9")]
    assert names(jobs_of(make_run(tmp_path), known)) == ["train-k3f9x"]


def test_job_of_another_user_with_the_run_name_is_ignored(tmp_path: Path) -> None:
    assert jobs_of(make_run(tmp_path), [replace(job(JobState.RUNNING), uid=4711)]) == []


def test_dead_coordinator_is_detected_only_on_its_host() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    here = socket.gethostname()
    assert coordinator_is_dead(status(coordinator_pid=child.pid, coordinator_host=here))
    assert not coordinator_is_dead(status(coordinator_pid=os.getpid(), coordinator_host=here))
    assert not coordinator_is_dead(status(coordinator_pid=child.pid, coordinator_host="elsewhere"))
    assert not coordinator_is_dead(status())
