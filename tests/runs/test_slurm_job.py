"""The meaning of Slurm's state for a job that is being ended."""

import pytest

from dalsegno.runs.coordinator.nodes.slurm_jobs import job_state
from dalsegno.slurm.facts import JobInfo, JobState


def ending(**more: object) -> JobInfo:
    fields: dict[str, object] = {"started_at": 1000, "ends_at": 1030, "time_limit_s": 3600, **more}
    return JobInfo(7, "train-k3f9x", "ada", JobState.COMPLETING, **fields)  # type: ignore[arg-type]


def test_job_that_ends_before_its_limit_was_cancelled():
    assert job_state(ending()) is JobState.CANCELLED
    assert job_state(ending(time_limit_s=None)) is JobState.CANCELLED


@pytest.mark.parametrize("why", [{"preempted_at": 1029}, {"ends_at": 4600}, {"ends_at": None}])
def test_preempted_expired_or_requeued_job_may_still_save(why: dict[str, object]):
    assert job_state(ending(**why)) is JobState.COMPLETING


def test_state_of_other_jobs_is_that_of_slurm():
    assert job_state(JobInfo(7, "train-k3f9x", "ada", JobState.RUNNING)) is JobState.RUNNING
    assert job_state(JobInfo(7, "train-k3f9x", "ada", JobState.TIMEOUT)) is JobState.TIMEOUT
