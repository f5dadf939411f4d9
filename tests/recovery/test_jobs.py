"""Tests of jobs on lost or drained nodes, and of what failing jobs say about a node."""

from __future__ import annotations

from dalsegno.containers.native import NO_CONTAINER
from dalsegno.health import Remedy
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.slurm.facts import JobState
from tests.recovery.clinic import MakeClinic


def test_a_job_requeued_by_slurm_starts_without_the_delay(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.power_off("n2")
    clinic.rounds(10)
    assert clinic.cluster.queue[7].reason == "Priority"
    clinic.cluster.start(7, "n3")
    clinic.round()
    assert "job 7 runs again on n3" in clinic.texts("n2")


def test_a_requeued_job_may_return_to_its_repaired_node(clinic_of: MakeClinic):
    """The job may need all nodes, or exactly this one. Its constraints are never changed."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", "n3", "n4")
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.cluster.updates == [{"JobId": "7", "StartTime": "now"}]
    assert clinic.store.records.get("n2").victims == (7,)
    clinic.cluster.start(7, "n1", "n2", "n3", "n4")
    clinic.round()
    assert clinic.texts("n2")[-1] == "job 7 runs again on n1, n2, n3, n4"
    assert clinic.store.records.get("n2").victims == ()


def test_a_job_still_on_its_lost_node_does_not_count_as_running_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.slow = True
    clinic.cluster.start(7, "n2")
    clinic.cluster.power_off("n2")
    clinic.rounds(10)
    assert clinic.store.records.get("n2").victims == (7,)
    assert "job 7 runs again on n2" not in clinic.texts("n2")


def test_a_job_that_ends_with_its_node_is_reported(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.power_off("n2")
    clinic.round()
    clinic.cluster.end(7, JobState.NODE_FAIL)
    clinic.settle()
    text = "job 7 ended with its node (NODE_FAIL) and may not be requeued"
    assert text in clinic.texts("n2")


def test_job_on_a_broken_node_is_requeued_or_waited_for(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.REBOOT, code="79")
    clinic.settle()
    assert clinic.cluster.queue[7].reason == "Priority"
    assert clinic.effects("n2")[-1] == "resume"

    clinic.cluster.start(8, "n3", requeue=False)
    clinic.cluster.break_gpu("n3", Remedy.REBOOT, code="79")
    clinic.rounds(50)
    assert clinic.effects("n3") == ["drain"]
    assert clinic.cluster.queue[8].state is JobState.RUNNING
    left = "job 8 cannot continue here but may not be requeued: waiting until it ends"
    assert clinic.texts("n3").count(left) == 1 and not [text for text in clinic.texts("n3") if "could not" in text]


def test_the_job_of_a_run_is_not_requeued(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.break_gpu("n2", Remedy.REBOOT, code="79")
    clinic.rounds(50)
    assert clinic.cluster.queue[7].state is JobState.RUNNING


def test_a_node_that_a_run_has_left_is_removed_from_it_and_repaired(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.break_gpu("n2", Remedy.REBOOT, code="79")
    clinic.rounds(20)
    assert clinic.effects("n2") == ["drain"], "the run still needs it"
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main left=n2,n9")
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "down", "evidence", "reboot", "validate", "resume"]
    assert clinic.cluster.queue[7].nodes == ("n1",) and clinic.cluster.forbidden == []


def test_completing_jobs_do_not_delay_the_repair_of_a_dead_slurmd(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2", comment="dalsegno:join")
    clinic.cluster.kill_slurmd("n2")
    clinic.rounds(20)
    assert clinic.effects("n2") == ["drain"], "running jobs may end"
    clinic.cluster.end(7, JobState.COMPLETING)
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "down", "evidence", "reboot", "validate", "resume"]


def test_a_node_with_quick_job_failures_is_drained_and_validated(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job, user in ((1, "ada"), (2, "ada"), (3, "bob")):
        clinic.cluster.start(job, "n2", user=user)
        clinic.cluster.end(job, JobState.FAILED)
    clinic.round()
    assert clinic.reason("n2") == "dalsegno:drain:black-hole 3 jobs failed here right after they started"
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_job_that_fails_everywhere_suspects_no_node(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):
        clinic.cluster.start(job, f"n{job % 4 + 1}", name="broken-script")
        clinic.cluster.end(job, JobState.FAILED)
    clinic.rounds(20)
    assert clinic.done == []


def test_quick_failures_of_one_user_are_reported_but_drain_no_node(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job, name in enumerate(("echo", "touch", "sh", "bad-image")):
        clinic.cluster.start(job, "n1", name=name)
        clinic.cluster.end(job, JobState.FAILED)
    clinic.rounds(20)
    assert clinic.effects("n1") == []
    text = "4 jobs failed here right after they started, all of one user"
    assert clinic.texts("n1") == [f"suspected: {text}"]
    clinic.rounds(int(clinic.policy.quick_window_s))
    assert clinic.texts("n1")[1:] == ["in service: no fault any more"]


def test_success_of_the_same_job_elsewhere_proves_a_node_fault(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):
        clinic.cluster.start(job, "n1", name="bad-image")
        clinic.cluster.end(job, JobState.FAILED)
    clinic.rounds(20)
    assert clinic.effects("n1") == []

    clinic.cluster.start(9, "n2", name="bad-image")  # it succeeds elsewhere, so the node is at fault
    clinic.cluster.end(9)
    clinic.round()
    assert clinic.effects("n1")[0] == "drain"


def test_one_user_cannot_drain_a_node_that_others_use(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(1, "n1", user="bob")
    for job in range(2, 9):
        clinic.cluster.start(job, "n1", name="same")
        clinic.cluster.end(job, JobState.FAILED)
    clinic.cluster.start(9, "n2", name="same")
    clinic.cluster.end(9)
    clinic.rounds(20)
    assert clinic.effects("n1") == [] and "all of one user" in clinic.texts("n1")[0]


def test_container_failures_neither_suspect_a_node_nor_hide_other_failures(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):  # each failure would count if the node were at fault
        clinic.cluster.start(job, "n1")
        clinic.cluster.end(job, JobState.FAILED, exit_code=NO_CONTAINER)
    clinic.rounds(20)
    assert clinic.done == []

    for job, user in ((11, "ada"), (12, "ada"), (13, "bob")):
        clinic.cluster.start(job, "n1", user=user)
        clinic.cluster.end(job, JobState.FAILED, exit_code=1)
        clinic.cluster.end(job - 10, JobState.FAILED, exit_code=NO_CONTAINER)
    clinic.round()
    assert clinic.reason("n1") == "dalsegno:drain:black-hole 3 jobs failed here right after they started"


def test_failing_jobs_of_runs_suspect_no_node(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):
        clinic.cluster.start(job, "n3", comment="dalsegno:join")
        clinic.cluster.end(job, JobState.FAILED)
    clinic.rounds(20)
    assert clinic.done == []


def test_successful_jobs_in_between_clear_the_node(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):
        clinic.cluster.start(job, "n1")
        clinic.cluster.end(job, JobState.COMPLETED if job % 3 == 0 else JobState.FAILED)
        clinic.wait(1)
    clinic.rounds(20)
    assert clinic.done == []
