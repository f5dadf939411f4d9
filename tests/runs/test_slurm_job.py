"""The meaning of Slurm's state for a job that is being ended."""

from dataclasses import dataclass
from typing import cast

import pytest

from dalsegno.runs.coordinator.slurm_jobs import ARRIVAL_S, LONGEST_S, AgentStep, job_state
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.system.children import Child


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


@dataclass
class PlayedChild:
    lives: bool = True

    def alive(self) -> bool:
        return self.lives


def test_agent_is_expected_for_a_while_after_its_srun_and_each_check():
    srun = PlayedChild()
    step = AgentStep(cast(Child, srun), ("n1", "n2"), began=100.0)
    assert step.will_bring("n1", 100 + ARRIVAL_S - 1) and not step.will_bring("n1", 100 + ARRIVAL_S)
    step.looked["n1"] = 100 + ARRIVAL_S
    assert step.will_bring("n1", 101 + ARRIVAL_S) and not step.will_bring("n2", 101 + ARRIVAL_S)
    assert not step.will_bring("n3", 101)
    step.left.add("n1")
    assert not step.will_bring("n1", 101) and not step.is_slow("n1", 101)
    srun.lives = False
    assert not step.will_bring("n2", 101) and not step.is_slow("n2", 101)


def test_overdue_agent_may_be_slow_unless_its_step_was_adopted():
    step = AgentStep(cast(Child, PlayedChild()), ("n1",), began=100.0)
    assert step.is_slow("n1", 100 + LONGEST_S - 1) and not step.is_slow("n1", 100 + LONGEST_S)
    assert not AgentStep(cast(Child, PlayedChild()), ("n1",), began=100.0, adopted=True).is_slow("n1", 200)
