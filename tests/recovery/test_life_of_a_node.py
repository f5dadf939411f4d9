"""The life of a node, from its fault to its return, on a cluster in memory."""

from __future__ import annotations

import pytest

from dalsegno.health import GpuIdentity, Remedy
from dalsegno.recovery.actions import Validate
from dalsegno.recovery.event import EventKind
from dalsegno.recovery.fakes import FakeNode
from dalsegno.recovery.phase import NodePhase
from dalsegno.recovery.presence import look_at_power
from tests.recovery.clinic import Clinic, MakeClinic


def test_nothing_is_done_to_a_cluster_that_is_well(clinic_of: MakeClinic):
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


def test_a_node_that_is_gone_is_set_down_replaced_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2") == ["down", "evidence", "replace", "validate", "resume"]


def test_nodes_that_come_back_do_not_all_prove_themselves_with_the_same_one(clinic_of: MakeClinic):
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
    """Rebuilt earlier, it would end the whole run."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.power_off("n2")
    clinic.round()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")  # Slurm has not finished with it
    clinic.rounds(50)
    assert clinic.effects("n2") == ["down"]
    clinic.cluster.start(7, "n1", comment="dalsegno:main")
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume"
    assert clinic.cluster.forbidden == []


def test_reset_then_reboot_then_replace(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REPLACE, says=Remedy.RESET)
    clinic.settle()
    tried = [each for each in clinic.effects("n2") if each in ("reset", "reboot", "replace")]
    assert tried == ["reset", "reboot", "replace"]
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_node_that_reboots_without_coming_back_is_replaced(clinic_of: MakeClinic):
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
    mends = [each for each in clinic.effects("n2") if each in ("reboot", "replace")]
    assert mends == ["reboot", "reboot", "replace"]


def test_two_reboots_are_two_hours_apart(clinic_of: MakeClinic):
    clinic = clinic_of()
    for _ in range(2):
        clinic.cluster.break_gpu("n2", Remedy.REBOOT)
        clinic.settle()
    assert [each for each in clinic.effects("n2") if each in ("reboot", "replace")] == ["reboot", "replace"]


def test_a_target_that_can_do_nothing_leaves_it_drained_and_says_so(clinic_of: MakeClinic):
    clinic = clinic_of(can=frozenset())
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.GIVEN_UP
    assert clinic.effects("n2") == ["drain", "evidence"]
    assert "cannot be replaced automatically" in clinic.told("n2")[-1]


def test_a_replacement_that_fails_validation_is_replaced_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.bad_replacements = 2
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 3
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_and_given_up_when_none_of_three_is_good(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.bad_replacements = 99
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 3
    assert clinic.phase("n2") is NodePhase.GIVEN_UP
    assert "replaced 3 times" in clinic.told("n2")[-1]


def test_after_ten_failed_replacements_in_a_partition_none_is_tried_until_someone_resumes(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0, per_hour=99, breaker=5)
    clinic.cluster.bad_replacements = 99
    for node in ("n1", "n2", "n3"):
        clinic.cluster.power_off(node)
        clinic.settle()
    assert sum(clinic.effects(node).count("replace") for node in ("n1", "n2", "n3")) == 5
    assert "5 replacements in train failed in a row" in clinic.told("n3")[-1]
    clinic.cluster.bad_replacements = 0
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.cluster.power_off("n4")
    clinic.settle()
    assert clinic.effects("n4")[-1] == "resume"


def test_the_same_gpu_coming_back_is_refused(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.same_gpus_again = 1
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 2
    assert any("passport: GPU GPU-2-a was replaced before" in text for text in clinic.told("n2"))
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_new_machine_is_not_returned_before_it_has_said_which_gpus_it_has(clinic_of: MakeClinic):
    """A moment after its agent has come, nothing is known of them."""
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
    assert any("passport: GPU GPU-2-a was replaced before" in text for text in clinic.told("n2"))


def test_a_node_whose_gpus_are_forgiven_is_validated_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.same_gpus_again = 99
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.GIVEN_UP
    clinic.store.record_gpus("n2", [GpuIdentity(0, "GPU-2-a"), GpuIdentity(1, "GPU-2-b")], clinic.cluster.now)
    assert [each.uuid for each in clinic.store.forgive("GPU-2-a", "ada", clinic.cluster.now)] == ["GPU-2-a"]
    clinic.settle()
    assert clinic.phase("n2") is NodePhase.GIVEN_UP, "the other one is still refused"
    clinic.store.forgive("n2", "ada", clinic.cluster.now)
    clinic.settle()
    assert (clinic.phase("n2"), clinic.effects("n2")[-2:]) == (NodePhase.IN_SERVICE, ["validate", "resume"])
    assert "GPU GPU-2-b was forgiven by ada and may come back" in clinic.told("n2")
    clinic.store.close()
    clinic.open()
    assert clinic.store.book.replaced_gpus == frozenset()


def test_the_evidence_lists_the_jobs_that_a_node_had_when_it_was_lost(clinic_of: MakeClinic):
    """Slurm has taken them from it when the evidence is saved."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.start(8, "n3")
    clinic.cluster.power_off("n2")
    clinic.settle()
    (jobs,) = (clinic.folder / "evidence/n2").glob("*/jobs.txt")
    assert [line.split()[0] for line in jobs.read_text().splitlines()] == ["7"]
    assert jobs.with_name("console.log").read_text() == "kernel panic", "it cannot speak itself, its target can"


def test_an_agent_that_may_yet_be_heard_is_waited_for_with_the_evidence(clinic_of: MakeClinic):
    """As after a restart of the controller: agents call again within seconds, and only they have the kernel's log."""
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.round()
    clinic.cluster.nodes["n2"].quiet = True
    clinic.rounds(5)
    assert clinic.effects("n2") == ["drain"]
    clinic.cluster.nodes["n2"].quiet = False
    clinic.round()
    assert clinic.effects("n2") == ["drain", "evidence"]


def test_but_not_for_ever(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.round()
    clinic.cluster.nodes["n2"].quiet = True
    clinic.rounds(20)
    assert clinic.effects("n2")[:2] == ["drain", "evidence"]


def test_a_node_that_comes_back_by_itself_is_only_validated(clinic_of: MakeClinic):
    clinic = clinic_of(gone_s=60.0)
    clinic.cluster.power_off("n2")
    clinic.rounds(10)
    clinic.cluster.nodes["n2"].machine.on = True
    clinic.settle()
    assert clinic.effects("n2") == ["down", "validate", "resume"]


def test_a_node_that_is_off_for_certain_is_not_waited_for(clinic_of: MakeClinic):
    clinic = clinic_of(gone_s=60.0)
    clinic.cluster.power_off("n2")
    clinic.round()
    clinic.cluster.now += 1
    facts = look_at_power(clinic.cluster.facts(), clinic.healer.hands.target)
    assert [action.kind for action in clinic.healer.round(facts)] == [EventKind.EVIDENCE]
    clinic.rounds(3)
    assert clinic.effects("n2") == ["down", "evidence"], "where it is not known, it is"


def test_what_only_a_person_can_mend_is_waited_for_and_validated_when_it_is_over(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.DRAIN, code="full")
    clinic.settle()
    clinic.rounds(600)
    assert clinic.phase("n2") is NodePhase.GIVEN_UP
    assert clinic.effects("n2") == ["drain"]
    assert "needs an administrator" in clinic.told("n2")[-1]
    clinic.cluster.nodes["n2"].machine.cured_by = None
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]


def test_what_a_validation_failed_for_and_a_person_has_mended_is_validated_again(clinic_of: MakeClinic):
    """As after a cable that was out and in: gone, back, and its port has gone down too often."""
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


def test_what_is_over_before_anything_was_done_is_only_validated_and_mended_the_second_time_in_a_day(
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
        assert clinic.effects("n2") == ["drain"], "what runs may end"
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


def test_a_run_need_not_leave_a_node_whose_file_system_answers_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    hangs_for_a_moment(clinic)
    assert clinic.phase("n2") is NodePhase.IN_SERVICE and clinic.effects("n2") == ["drain", "resume"]
    assert clinic.told("n2")[-1] == "back in service (file-systems passes again)"
    hangs_for_a_moment(clinic)
    assert clinic.phase("n2") is NodePhase.DRAINED, "the second time in a day it is mended"


@pytest.mark.parametrize(
    ("check", "comment", "why"),
    [
        ("file-systems", "dalsegno:main left=n2", "the run has left it: it can be tried"),
        ("gpu-count", "dalsegno:main", "a GPU that comes and goes is no good one"),
        ("file-systems", "", "a plain job does not leave"),
    ],
)
def test_a_node_is_returned_untried_for_the_sake_of_a_run_alone(
    clinic_of: MakeClinic, check: str, comment: str, why: str
):
    clinic = clinic_of(doomed=frozenset())
    clinic.cluster.start(7, "n1", "n2", comment=comment)
    hangs_for_a_moment(clinic, check)
    assert not any("passes again" in text for text in clinic.told("n2")), why


def test_why_a_node_is_replaced_that_a_reboot_might_have_helped_is_told(clinic_of: MakeClinic):
    clinic = clinic_of()
    for _ in range(2):
        clinic.cluster.break_gpu("n2", Remedy.REBOOT)
        clinic.settle()
    assert [each for each in clinic.effects("n2") if each in ("reboot", "replace")] == ["reboot", "replace"]
    fault = "xid[79]: GPU has fallen off the bus"
    assert f"starting to reboot it: {fault}" in clinic.told("n2")
    assert f"starting to replace it: {fault} (it was rebooted less than 2 h ago)" in clinic.told("n2")


def test_a_node_that_was_given_up_and_booted_by_someone_is_validated_again(clinic_of: MakeClinic):
    clinic = clinic_of(can=frozenset())
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.settle()
    clinic.cluster.nodes["n2"].machine = clinic.cluster.machine()
    clinic.settle()
    assert clinic.effects("n2")[-2:] == ["validate", "resume"]


def test_a_node_without_an_agent_is_left_alone(clinic_of: MakeClinic):
    """Nobody could tell when it is well again."""
    clinic = clinic_of()
    node = clinic.cluster.nodes["n5"] = FakeNode(clinic.cluster.machine())
    node.agent = False
    clinic.rounds(3)
    clinic.cluster.power_off("n5")
    clinic.rounds(100)
    assert clinic.done == []


def test_a_reboot_that_was_ordered_just_before_our_death_is_not_ordered_again_while_it_may_still_begin(
    clinic_of: MakeClinic,
):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(2)
    target = clinic.healer.hands.target
    clinic.healer.beside = lambda work: None  # told, and we die; the machine room takes its time
    clinic.round()
    clinic.store.close()
    clinic.open()
    clinic.rounds(10)
    assert "reboot" not in clinic.effects("n2")
    target.reboot("n2")  # type: ignore[attr-defined]
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reboot", "validate", "resume"]


def test_and_one_that_nobody_heard_is_ordered_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(2)
    clinic.healer.beside = lambda work: None
    clinic.round()
    clinic.store.close()
    clinic.open()
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reboot", "validate", "resume"]
