"""The jobs of a run: the meaning of Slurm's state for a job that is being ended, and the log of the agents."""

import asyncio
from pathlib import Path

import pytest

from dalsegno.log import MAX_BYTES
from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.nodes.slurm_jobs import SlurmJobs, job_state
from dalsegno.runs.coordinator.saved_state import SavedJob, SavedStep
from dalsegno.runs.folder import RunFolder
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.system.children import start
from tests.runs.small_site import SmallSite


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


def test_long_log_of_the_agents_is_rotated_and_new_output_of_a_step_is_still_found(tmp_path: Path):
    folder = RunFolder(tmp_path)
    folder.agents_log.write_bytes(b"x" * (MAX_BYTES + 1))
    step = start(["sleep", "600"], {"PATH": "/usr/bin:/bin"})

    async def check() -> dict[int, str]:
        jobs = SlurmJobs(SmallSite(folder), None)  # type: ignore[arg-type]
        jobs.adopt([SavedJob(JobRole.MAIN, 7, 1, None, (SavedStep(step.process, ("n1",)),))])
        await jobs.check()
        with folder.agents_log.open("a") as log:
            log.write("srun: error: n1: task 0: Killed\n")
        return jobs.step_output(["n1"])

    try:
        assert asyncio.run(check()) == {1: "srun: error: n1: task 0: Killed\n"}
    finally:
        step.kill()
    assert (tmp_path / "agents.log.1").stat().st_size == MAX_BYTES
