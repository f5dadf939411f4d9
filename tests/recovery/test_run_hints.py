"""Tests of the reports of runs about nodes: a report counts only for the user's own run and its jobs."""

from __future__ import annotations

import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.decisions.facts import CORRUPTION, Facts, NodeFacts
from dalsegno.recovery.decisions.judge import current_faults, find_suspicion
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.records import NodeRecord
from dalsegno.recovery.runs.run_hints import REPORT_VALID_S, WrongResultReports, with_hint
from dalsegno.recovery.runs.run_records import RunRecord
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase, RunStatus, write_status
from dalsegno.slurm.facts import JobInfo, JobState, NodeInfo, NodeState
from dalsegno.wire.liveness import Presence
from tests.recovery.clinic import MakeClinic

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


# Nodes that a run reports for wrong results

UID = os.geteuid()
WRONG = {"run": "train-k3f9", "node": "n2", "text": "wrong gradients in step 48"}
FACTS = Facts(
    {name: NodeFacts(NodeInfo(name, NodeState.MIXED), (JOB,) if name != "n3" else ()) for name in ("n1", "n2", "n3")},
    (JOB,), runs={"train-k3f9": UID},
)  # fmt: skip


def reporting(now: list[float] | None = None) -> WrongResultReports:
    clock = now or [0.0]
    return WrongResultReports(lambda: {"train-k3f9": RunRecord("/runs/train-k3f9", UID)}, lambda: clock[0])


def reported(facts: Facts) -> dict[str, str]:
    return {name: node.wrong_result for name, node in (facts.nodes or {}).items() if node.wrong_result}


def test_node_of_the_run_is_reported_for_a_minute():
    now = [0.0]
    wrong_results = reporting(now)
    wrong_results.add(UID, WRONG)
    assert reported(wrong_results.add_to(FACTS)) == {"n2": "wrong gradients in step 48"}
    now[0] = REPORT_VALID_S
    assert reported(wrong_results.add_to(FACTS)) == {}


def test_repeated_report_is_counted_once_and_a_long_name_is_refused():
    """A user must not be able to fill the controller's memory or keep it busy."""
    wrong_results = reporting()
    assert [wrong_results.add(UID, WRONG) for _ in range(3)] == [True, False, False]
    with pytest.raises(DalsegnoError, match="not the name of a node"):
        wrong_results.add(UID, {**WRONG, "node": "n" * 256})


def test_report_of_a_user_without_a_job_on_the_node_does_not_hide_that_of_another():
    both = {"train-k3f9": RunRecord("/runs/train-k3f9", UID), "other": RunRecord("/runs/other", UID + 1)}
    wrong_results = WrongResultReports(lambda: both, lambda: 0.0)
    wrong_results.add(UID, WRONG)
    wrong_results.add(UID + 1, {**WRONG, "run": "other", "text": "nothing"})
    assert reported(wrong_results.add_to(FACTS)) == {"n2": "wrong gradients in step 48"}


def test_node_on_which_the_run_has_no_job_is_not_reported():
    wrong_results = reporting()
    wrong_results.add(UID, {**WRONG, "node": "n3"})
    assert reported(wrong_results.add_to(FACTS)) == {}
    assert reported(wrong_results.add_to(replace(FACTS, runs={"train-k3f9": UID + 1}))) == {}


@pytest.mark.parametrize("request_", [None, {}, {**WRONG, "node": 7}, {**WRONG, "run": "another"}])
def test_report_of_another_users_run_or_without_evidence_is_refused(request_: object):
    with pytest.raises(DalsegnoError):
        reporting().add(UID, request_)
    with pytest.raises(DalsegnoError, match="you have no run"):
        reporting().add(UID + 1, WRONG)


def test_runs_of_one_user_can_have_one_node_a_day_drained():
    now = [0.0]
    wrong_results = reporting(now)
    wrong_results.add(UID, WRONG)
    wrong_results.add(UID, WRONG)
    with pytest.raises(DalsegnoError, match="1 node a day"):
        wrong_results.add(UID, {**WRONG, "node": "n1"})
    now[0] = 86400.0
    wrong_results.add(UID, {**WRONG, "node": "n1"})


def test_reported_node_is_drained_and_waits_for_an_administrator(clinic_of: MakeClinic):
    """A validation cannot detect what the run found, so passing a validation does not return the node to service."""
    clinic = clinic_of()
    clinic.rounds(3)
    facts = clinic.cluster.facts(frozenset())
    nodes = {**(facts.nodes or {})}
    nodes["n2"] = replace(nodes["n2"], wrong_result="wrong gradients in step 48", reported_by_owner=True)
    clinic.cluster.now += 1
    clinic.loop.round(replace(facts, nodes=nodes))
    assert clinic.reason("n2") == "dalsegno:drain:corruption wrong gradients in step 48"
    clinic.settle()
    clinic.wait(clinic.policy.person_s)
    clinic.rounds(2)
    assert clinic.effects("n2") == ["drain"] and clinic.phase("n2") is NodePhase.NEEDS_ADMIN


def test_run_of_another_user_cannot_cause_a_drain_unless_the_cluster_file_allows_it():
    node = replace((FACTS.nodes or {})["n2"], wrong_result="wrong gradients")
    node = replace(node, agent=replace(node.agent, presence=Presence.CONNECTED))
    own, on, off = NodeRecord("n2"), Policy(on=frozenset({CORRUPTION})), Policy(off=frozenset({CORRUPTION}))
    assert current_faults(node, own, Policy()) == []
    suspicion = find_suspicion(node, own, Policy())
    assert suspicion is not None and suspicion.text == "a run reports wrong gradients"
    assert [fault.check for fault in current_faults(node, own, on)] == [CORRUPTION]
    by_owner = replace(node, reported_by_owner=True)
    assert [fault.check for fault in current_faults(by_owner, own, Policy())] == [CORRUPTION]
    assert current_faults(by_owner, own, off) == [] and find_suspicion(by_owner, own, off) is None


def test_reports_of_root_and_of_the_owner_count_as_the_owners():
    wrong_results = reporting()
    wrong_results.add(UID, WRONG)
    assert (wrong_results.add_to(FACTS).nodes or {})["n2"].reported_by_owner, "tests run as the owner"
