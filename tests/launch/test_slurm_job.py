"""What Slurm says of a job that is being ended, and what it means."""

import pytest

from dalsegno.launch.slurm_job import fate
from dalsegno.slurm.job_info import JobInfo
from dalsegno.slurm.states import JobState


def ending(**more: object) -> JobInfo:
    fields: dict[str, object] = {"started_at": 1000, "ends_at": 1030, "time_limit_s": 3600, **more}
    return JobInfo(7, "train-k3f9x", "ada", JobState.COMPLETING, **fields)  # type: ignore[arg-type]


def test_one_that_is_ended_before_its_time_was_cancelled():
    assert fate(ending()) is JobState.CANCELLED
    assert fate(ending(time_limit_s=None)) is JobState.CANCELLED


@pytest.mark.parametrize("why", [{"preempted_at": 1029}, {"ends_at": 4600}, {"ends_at": None}])
def test_one_that_is_preempted_out_of_time_or_queued_again_may_still_save(why: dict[str, object]):
    assert fate(ending(**why)) is JobState.COMPLETING


def test_one_that_is_not_being_ended_is_what_slurm_says():
    assert fate(JobInfo(7, "train-k3f9x", "ada", JobState.RUNNING)) is JobState.RUNNING
    assert fate(JobInfo(7, "train-k3f9x", "ada", JobState.TIMEOUT)) is JobState.TIMEOUT
