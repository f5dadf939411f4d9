"""Tests of faults in the user's own workers on a foreign cluster: which job is entered, and the errors."""

from __future__ import annotations

import getpass
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.inject.faults import FAULTS, FaultOptions
from dalsegno.inject.own_jobs import OwnJobs, step_argv
from dalsegno.inject.worker_program import WantedWorker
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo, NodeState

ME = getpass.getuser()


def job(number: int, user: str = ME, nodes: tuple[str, ...] = ("n1",), name: str = "train-x", **what: Any) -> JobInfo:
    state = what.pop("state", JobState.RUNNING)
    return JobInfo(number, name, user, state, nodes=nodes, comment="dalsegno:main", **what)


@dataclass
class Played:
    """A Slurm with these jobs, and the output of commands on its nodes."""

    queue: list[JobInfo]
    says: list[dict[str, Any]] = field(default_factory=list)
    entered: list[tuple[str, str, WantedWorker]] = field(default_factory=list)

    def jobs(self) -> list[JobInfo]:
        return self.queue

    def node(self, name: str) -> NodeInfo:
        return NodeInfo(name, NodeState.MIXED)

    def enter(self, job: str, node: str, wish: WantedWorker) -> dict[str, Any]:
        self.entered.append((job, node, wish))
        return self.says.pop(0)

    @property
    def nodes(self) -> OwnJobs:
        return OwnJobs(self, self.enter)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [each for each in FAULTS.values() if not each.safe], ids=lambda fault: fault.name)
def test_fault_that_affects_other_users_is_refused_before_slurm_is_asked(fault: Any):
    played = Played([job(7)])
    with pytest.raises(UsageError) as caught:
        played.nodes.inject(fault, "n1", FaultOptions())
    assert "worker-kill, worker-hang" in caught.value.hint and played.entered == []


def test_only_running_jobs_of_the_user_on_the_node_are_entered():
    others = [job(1, user="bob"), job(2, nodes=("n2",)), job(3, state=JobState.PENDING), job(4, name="another")]
    played = Played([*others, job(7)], [{"rank": 0, "pid": 5, "run": "train-x"}])
    played.nodes.inject(FAULTS["worker-kill"], "n1", FaultOptions(run="train-x", rank=0))
    assert played.entered == [("7", "n1", WantedWorker("7", "worker-kill", "train-x", 0))]
    with pytest.raises(NotThere, match="no job of yours runs on n3"):
        played.nodes.inject(FAULTS["worker-kill"], "n3", FaultOptions())


def test_job_with_the_wanted_worker_is_found_among_several():
    played = Played([job(7), job(8)], [{"error": "there is no worker on n1", "hint": "-"}, {"rank": 0, "pid": 5}])
    assert played.nodes.inject(FAULTS["slow-gpu"], "n1", FaultOptions(gpu=1, for_s=2.0))["rank"] == 0
    assert played.entered[-1] == ("8", "n1", WantedWorker("8", "slow-gpu", gpu=1, for_s=2.0))


def test_missing_worker_is_an_error_with_the_hint_of_the_node():
    played = Played([job(7)], [{"error": "there is no worker of rank 9 on n1", "hint": "there is rank 0"}])
    with pytest.raises(DalsegnoError) as caught:
        played.nodes.inject(FAULTS["worker-hang"], "n1", FaultOptions(rank=9))
    assert (caught.value.what, caught.value.hint) == ("there is no worker of rank 9 on n1", "there is rank 0")


def test_active_faults_are_searched_on_all_nodes_of_the_users_runs():
    played = Played([job(7, nodes=("n1", "n2"))], [{"found": []}, {"found": ["worker-hang"]}])
    assert [(fault.fault, fault.node) for fault in played.nodes.injected()] == [("worker-hang", "n2")]


def test_only_the_named_fault_is_cleared_in_the_users_jobs_on_the_node():
    played = Played([job(7), job(8), job(9, user="bob")], [{"found": ["worker-hang"]}, {"found": []}])
    assert [cleared.fault for cleared in played.nodes.clear("n1", "worker-hang")] == ["worker-hang"]
    assert played.entered == [(each, "n1", WantedWorker(each, "clear", fault="worker-hang")) for each in ("7", "8")]


def test_step_reserves_no_resources_and_names_are_separate_arguments():
    argv = step_argv("7", "n1", WantedWorker("7", "worker-kill", run="$(reboot)"))
    assert {"--jobid=7", "--overlap", "--nodelist=n1", "--gres=none", "--mem=0"} <= set(argv)
    assert json.loads(argv[-1])["run"] == "$(reboot)"
    with pytest.raises(DalsegnoError):
        step_argv("7", "n1;reboot", WantedWorker("7", "worker-kill"))
