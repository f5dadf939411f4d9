"""Tests of what `down` lists before it removes a cluster: runs, other jobs, home folders."""

from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.targets.base import Removal


def job(number: int, name: str, user: str = "ada") -> JobInfo:
    return JobInfo(number, name, user, JobState.RUNNING)


def test_removal_of_an_idle_cluster_has_no_consequences():
    assert Removal().sentences([]) == []


def test_removal_names_runs_without_their_jobs():
    removal = Removal((job(1, "train-k3f9x"), job(2, "sleep", "bob")), ("ada", "bob"))
    assert removal.sentences(["train-k3f9x"]) == [
        "ends 1 run (train-k3f9x)",
        "ends 1 job (2 of bob)",
        "deletes 2 home folders (ada, bob), with all runs and checkpoints in them",
    ]
