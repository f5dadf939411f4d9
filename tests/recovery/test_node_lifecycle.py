"""Tests of the lifecycle of a node, from its fault to its return, on a cluster in memory."""

from __future__ import annotations

import pytest

from dalsegno.health import GpuIdentity, Remedy
from dalsegno.recovery.decisions.actions import Validate
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.fakes import FakeNode
from dalsegno.recovery.journal.event import EventKind
from dalsegno.recovery.watch import mark_powered_off
from tests.recovery.clinic import Clinic, MakeClinic


def test_nothing_is_done_on_a_healthy_cluster(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.rounds(100)
    assert clinic.done == []


def test_a_node_with_xid_79_is_drained_rebooted_validated_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.round()
    assert clinic.reason("n2") == "dalsegno:reboot:xid[79] GPU has fallen off the bus"
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reboot", "validate", "resume"]
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_lost_node_is_set_down_replaced_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2") == ["down", "evidence", "replace", "validate", "resume"]


def test_returning_nodes_are_validated_with_different_partners(clinic_of: MakeClinic):
    clinic = clinic_of(per_hour=100)
    for node in ("n1", "n2", "n3", "n4"):
        clinic.cluster.break_gpu(node, Remedy.REBOOT)
        clinic.settle()
    asked = {action.node: action.partner for action in clinic.done if isinstance(action, Validate)}
    assert len(set(asked.values())) > 2 and all(node != partner for node, partner in asked.items()), asked


def test_a_live_node_keeps_its_jobs_until_they_end(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
    clinic.rounds(500)
    assert clinic.effects("n2") == ["drain"]
    clinic.cluster.end(7)
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reset", "validate", "resume"]
    assert clinic.cluster.forbidden == [] and not clinic.cluster.nodes["n2"].resting


def test_a_lost_node_is_not_rebuilt_while_slurm_has_jobs_on_it(clinic_of: MakeClinic):
    """A rebuild before Slurm removes the node from its job would end the whole run."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.power_off("n2")
    clinic.round()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")  # Slurm has not removed n2 from the job yet
    clinic.rounds(50)
    assert clinic.effects("n2") == ["down"]
    clinic.cluster.start(7, "n1", comment="dalsegno:main")
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume"
    assert clinic.cluster.forbidden == []


def test_reset_is_followed_by_reboot_and_replacement(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REPLACE, says=Remedy.RESET)
    clinic.settle()
    tried = [each for each in clinic.effects("n2") if each in ("reset", "reboot", "replace")]
    assert tried == ["reset", "reboot", "replace"]
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_node_that_does_not_come_back_from_a_reboot_is_replaced(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(3)  # drained, evidence, rebooted
    assert clinic.effects("n2")[-1] == "reboot"
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2")[-3:] == ["replace", "validate", "resume"]


def test_a_node_is_rebooted_twice_for_a_fault_and_then_replaced(clinic_of: MakeClinic):
    clinic = clinic_of(reboots_apart_s=0.0, reboots_per_fault=2)
    for _ in range(3):
        clinic.cluster.break_gpu("n2", Remedy.REBOOT)
        clinic.settle()
    repairs = [each for each in clinic.effects("n2") if each in ("reboot", "replace")]
    assert repairs == ["reboot", "reboot", "replace"]


def test_a_second_reboot_within_two_hours_becomes_a_replacement(clinic_of: MakeClinic):
    clinic = clinic_of()
    for _ in range(2):
        clinic.cluster.break_gpu("n2", Remedy.REBOOT)
        clinic.settle()
    assert [each for each in clinic.effects("n2") if each in ("reboot", "replace")] == ["reboot", "replace"]


def test_without_target_support_the_node_stays_drained(clinic_of: MakeClinic):
    clinic = clinic_of(can=frozenset())
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.NEEDS_ADMIN
    assert clinic.effects("n2") == ["drain", "evidence"]
    assert "cannot be replaced automatically" in clinic.texts("n2")[-1]


def test_a_replacement_that_fails_validation_is_replaced_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.bad_replacements = 2
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 3
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_node_is_left_to_an_administrator_after_three_faulty_replacements(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.bad_replacements = 99
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 3
    assert clinic.phase("n2") is NodePhase.NEEDS_ADMIN
    assert "replaced 3 times" in clinic.texts("n2")[-1]


def test_after_too_many_failed_replacements_none_is_tried_until_resumed(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0, per_hour=99, breaker=5)
    clinic.cluster.bad_replacements = 99
    for node in ("n1", "n2", "n3"):
        clinic.cluster.power_off(node)
        clinic.settle()
    assert sum(clinic.effects(node).count("replace") for node in ("n1", "n2", "n3")) == 5
    assert "5 replacements in train failed in a row" in clinic.texts("n3")[-1]
    clinic.cluster.bad_replacements = 0
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.cluster.power_off("n4")
    clinic.settle()
    assert clinic.effects("n4")[-1] == "resume"


def test_a_replacement_with_a_replaced_gpu_is_refused(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.same_gpus_again = 1
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 2
    assert any("passport: GPU GPU-2-a was replaced before" in text for text in clinic.texts("n2"))
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_new_machine_is_not_returned_before_its_gpus_are_known(clinic_of: MakeClinic):
    """Right after its agent has connected, its GPUs are not known yet."""
    clinic = clinic_of()
    clinic.cluster.same_gpus_again = 1
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    while "replace" not in clinic.effects("n2"):
        clinic.round()
    clinic.cluster.tell_gpus = False
    clinic.rounds(20)
    assert clinic.phase("n2") is NodePhase.VALIDATING
    clinic.cluster.tell_gpus = True
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 2
    assert any("passport: GPU GPU-2-a was replaced before" in text for text in clinic.texts("n2"))


def test_a_node_whose_gpus_are_forgiven_is_validated_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.same_gpus_again = 99
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.NEEDS_ADMIN
    clinic.store.record_gpus("n2", [GpuIdentity(0, "GPU-2-a"), GpuIdentity(1, "GPU-2-b")], clinic.cluster.now)
    assert [each.uuid for each in clinic.store.forgive("GPU-2-a", "ada", clinic.cluster.now)] == ["GPU-2-a"]
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.NEEDS_ADMIN, "the other one is still refused"
    clinic.store.forgive("n2", "ada", clinic.cluster.now)
    clinic.settle()
    assert (clinic.phase("n2"), clinic.effects("n2")[-2:]) == (NodePhase.IN_SERVICE, ["validate", "resume"])
    assert "GPU GPU-2-b was forgiven by ada and may come back" in clinic.texts("n2")
    clinic.store.close()
    clinic.open()
    assert clinic.store.records.replaced_gpus == frozenset()


def test_evidence_lists_the_jobs_of_the_lost_node(clinic_of: MakeClinic):
    """Slurm has already removed the jobs from the node when the evidence is saved."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.start(8, "n3")
    clinic.cluster.power_off("n2")
    clinic.settle()
    (jobs,) = (clinic.folder / "evidence/n2").glob("*/jobs.txt")
    assert [line.split()[0] for line in jobs.read_text().splitlines()] == ["7"]
    assert jobs.with_name("console.log").read_text() == "kernel panic", (
        "the target has logs of a node that does not answer"
    )


def test_evidence_waits_for_an_agent_that_may_reconnect(clinic_of: MakeClinic):
    """After a controller restart agents reconnect within seconds, and only they have the kernel log."""
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.round()
    clinic.cluster.nodes["n2"].quiet = True
    clinic.rounds(5)
    assert clinic.effects("n2") == ["drain"]
    clinic.cluster.nodes["n2"].quiet = False
    clinic.round()
    assert clinic.effects("n2") == ["drain", "evidence"]


def test_evidence_waits_for_a_silent_agent_only_for_a_limited_time(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.round()
    clinic.cluster.nodes["n2"].quiet = True
    clinic.rounds(20)
    assert clinic.effects("n2")[:2] == ["drain", "evidence"]


def test_a_node_that_returns_by_itself_is_only_validated(clinic_of: MakeClinic):
    clinic = clinic_of(gone_s=60.0)
    clinic.cluster.power_off("n2")
    clinic.rounds(10)
    clinic.cluster.nodes["n2"].machine.on = True
    clinic.settle()
    assert clinic.effects("n2") == ["down", "validate", "resume"]


def test_a_node_that_is_certainly_off_gets_no_grace_period(clinic_of: MakeClinic):
    clinic = clinic_of(gone_s=60.0)
    clinic.cluster.power_off("n2")
    clinic.round()
    clinic.cluster.now += 1
    facts = mark_powered_off(clinic.cluster.facts(), clinic.loop.context.target)
    assert [action.kind for action in clinic.loop.round(facts)] == [EventKind.EVIDENCE]
    clinic.rounds(3)
    assert clinic.effects("n2") == ["down", "evidence"], "without that knowledge it gets one"


def test_a_fault_for_an_administrator_is_validated_when_it_is_over(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.DRAIN, code="full")
    clinic.settle()
    clinic.rounds(600)
    assert clinic.phase("n2") is NodePhase.NEEDS_ADMIN
    assert clinic.effects("n2") == ["drain"]
    assert clinic.texts("n2")[-1].startswith("needs admin: ")
    clinic.cluster.nodes["n2"].machine.cured_by = None
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]


def test_a_node_is_validated_again_after_an_administrator_repaired_it(clinic_of: MakeClinic):
    """A cable was pulled and plugged in again: the node is back, but the check of its port still fails at first."""
    clinic = clinic_of(gone_s=60.0)
    clinic.cluster.power_off("n2")
    clinic.rounds(10)
    clinic.cluster.nodes["n2"].machine.on = True
    clinic.cluster.break_gpu("n2", Remedy.DRAIN, code="flaps")
    clinic.rounds(200)
    assert clinic.phase("n2") is NodePhase.DRAINED and clinic.effects("n2") == ["down", "validate"]
    clinic.cluster.nodes["n2"].machine.cured_by = None
    clinic.settle()
    assert clinic.effects("n2") == ["down", "validate", "validate", "resume"]


def test_a_passing_fault_is_only_validated_the_first_time_in_a_day(
    clinic_of: MakeClinic,
):
    clinic = clinic_of()
    for job, done in ((7, []), (8, ["evidence", "reboot"])):
        clinic.cluster.start(job, "n2")
        clinic.cluster.break_gpu("n2", Remedy.REBOOT)
        clinic.cluster.nodes["n2"].machine.check = "file-systems"
        clinic.rounds(3)
        clinic.cluster.nodes["n2"].machine.cured_by = None
        clinic.rounds(3)
        assert clinic.effects("n2") == ["drain"], "running jobs may end"
        clinic.cluster.end(job)
        clinic.settle()
        assert clinic.effects("n2") == ["drain", *done, "validate", "resume"]
        clinic.effects("n2").clear()


def hangs_for_a_moment(clinic: Clinic, check: str = "file-systems") -> None:
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.cluster.nodes["n2"].machine.check = check
    clinic.rounds(3)
    assert clinic.phase("n2").out
    clinic.cluster.nodes["n2"].machine.cured_by = None
    clinic.rounds(3)


def test_a_run_can_stay_on_a_node_whose_file_system_answers_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    hangs_for_a_moment(clinic)
    assert clinic.phase("n2") is NodePhase.IN_SERVICE and clinic.effects("n2") == ["drain", "resume"]
    assert clinic.texts("n2")[-1] == "back in service (file-systems passes again)"
    hangs_for_a_moment(clinic)
    assert clinic.phase("n2") is NodePhase.DRAINED, "the second time in a day it is repaired"


@pytest.mark.parametrize(
    ("check", "comment", "why"),
    [
        ("file-systems", "dalsegno:main left=n2", "the run has left it, so it can be validated"),
        ("gpu-count", "dalsegno:main", "a GPU that disappears temporarily is faulty"),
        ("file-systems", "", "a plain job does not leave the node"),
    ],
)
def test_a_node_returns_without_validation_only_for_runs(clinic_of: MakeClinic, check: str, comment: str, why: str):
    clinic = clinic_of(job_ending=frozenset())
    clinic.cluster.start(7, "n1", "n2", comment=comment)
    hangs_for_a_moment(clinic, check)
    assert not any("passes again" in text for text in clinic.texts("n2")), why


def test_the_event_says_why_a_node_is_replaced_and_not_rebooted(clinic_of: MakeClinic):
    clinic = clinic_of()
    for _ in range(2):
        clinic.cluster.break_gpu("n2", Remedy.REBOOT)
        clinic.settle()
    assert [each for each in clinic.effects("n2") if each in ("reboot", "replace")] == ["reboot", "replace"]
    fault = "xid[79]: GPU has fallen off the bus"
    assert f"starting to reboot it: {fault}" in clinic.texts("n2")
    assert f"starting to replace it: {fault} (it was rebooted less than 2 h ago)" in clinic.texts("n2")


def test_an_abandoned_node_is_validated_after_a_reboot_by_an_administrator(clinic_of: MakeClinic):
    clinic = clinic_of(can=frozenset())
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.settle()
    clinic.cluster.nodes["n2"].machine = clinic.cluster.machine()
    clinic.settle()
    assert clinic.effects("n2")[-2:] == ["validate", "resume"]


def test_a_node_without_an_agent_is_left_alone(clinic_of: MakeClinic):
    """Without an agent, its recovery could not be confirmed."""
    clinic = clinic_of()
    node = clinic.cluster.nodes["n5"] = FakeNode(clinic.cluster.machine())
    node.agent = False
    clinic.rounds(3)
    clinic.cluster.power_off("n5")
    clinic.rounds(100)
    assert clinic.done == []


def test_a_reboot_ordered_before_a_crash_is_not_repeated_while_it_may_begin(
    clinic_of: MakeClinic,
):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(2)
    target = clinic.loop.context.target
    # The target got the order, the controller dies, and the reboot takes a while.
    clinic.loop.background = lambda work: None
    clinic.round()
    clinic.store.close()
    clinic.open()
    clinic.rounds(10)
    assert "reboot" not in clinic.effects("n2")
    target.reboot("n2")  # type: ignore[attr-defined]
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reboot", "validate", "resume"]


def test_a_reboot_that_never_began_is_ordered_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(2)
    clinic.loop.background = lambda work: None
    clinic.round()
    clinic.store.close()
    clinic.open()
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reboot", "validate", "resume"]
