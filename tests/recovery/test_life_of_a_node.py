"""The life of a node, from its fault to its return, on a cluster in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dalsegno.health import Gpu, Remedy
from dalsegno.recovery.actions import SetDown
from dalsegno.recovery.decide import decide
from dalsegno.recovery.fakes import FakeCluster, FakeNode
from dalsegno.recovery.phase import Phase
from dalsegno.recovery.policy import Policy
from dalsegno.recovery.sight import is_blind
from dalsegno.slurm import SPARE_REASON, JobState, NodeFlag
from tests.recovery.clinic import Clinic

MakeClinic = Callable[..., Clinic]


@pytest.fixture
def clinic_of() -> Iterator[MakeClinic]:
    made: list[Clinic] = []

    def make(count: int = 4, **policy: object) -> Clinic:
        made.append(Clinic(FakeCluster.of(count), Policy(**policy)))  # type: ignore[arg-type]
        made[-1].round()
        return made[-1]

    yield make
    for clinic in made:
        clinic.store.close()
        shutil.rmtree(clinic.folder)


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
    assert clinic.phase("n2") is Phase.IN_SERVICE


def test_a_node_that_is_gone_is_set_down_replaced_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2") == ["down", "evidence", "replace", "validate", "resume"]


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
    assert clinic.phase("n2") is Phase.IN_SERVICE


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
    assert clinic.phase("n2") is Phase.GIVEN_UP
    assert clinic.effects("n2") == ["drain", "evidence"]
    assert "cannot be replaced from here" in clinic.told("n2")[-1]


def test_a_replacement_that_fails_validation_is_replaced_again(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.bad_replacements = 2
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 3
    assert clinic.phase("n2") is Phase.IN_SERVICE


def test_and_given_up_when_none_of_three_is_good(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.bad_replacements = 99
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 3
    assert clinic.phase("n2") is Phase.GIVEN_UP
    assert "replaced 3 times" in clinic.told("n2")[-1]


def test_after_ten_failed_replacements_in_a_partition_none_is_tried_until_someone_resumes(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0, per_hour=99, breaker=5)
    clinic.cluster.bad_replacements = 99
    for node in ("n1", "n2", "n3"):
        clinic.cluster.power_off(node)
        clinic.settle()
    assert sum(clinic.effects(node).count("replace") for node in ("n1", "n2", "n3")) == 5
    assert "5 replacements in train failed one after the other" in clinic.told("n3")[-1]
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
    assert any("passport: GPU GPU-2-a was sent away before" in text for text in clinic.told("n2"))
    assert clinic.phase("n2") is Phase.IN_SERVICE


def test_a_new_machine_is_not_returned_before_it_has_said_which_gpus_it_has(clinic_of: MakeClinic):
    """A moment after its agent has come, nothing is known of them."""
    clinic = clinic_of()
    clinic.cluster.same_gpus_again = 1
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    while "replace" not in clinic.effects("n2"):
        clinic.round()
    clinic.cluster.tell_gpus = False
    clinic.rounds(20)
    assert clinic.phase("n2") is Phase.VALIDATING
    clinic.cluster.tell_gpus = True
    clinic.settle()
    assert clinic.effects("n2").count("replace") == 2
    assert any("passport: GPU GPU-2-a was sent away before" in text for text in clinic.told("n2"))


def test_a_node_whose_gpus_are_forgiven_is_validated_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.same_gpus_again = 99
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.settle()
    assert clinic.phase("n2") is Phase.GIVEN_UP
    clinic.store.notice_gpus("n2", [Gpu(0, "GPU-2-a"), Gpu(1, "GPU-2-b")], clinic.cluster.now)
    assert [each.uuid for each in clinic.store.forgive("GPU-2-a", "ada", clinic.cluster.now)] == ["GPU-2-a"]
    clinic.settle()
    assert clinic.phase("n2") is Phase.GIVEN_UP, "the other one is still refused"
    clinic.store.forgive("n2", "ada", clinic.cluster.now)
    clinic.settle()
    assert (clinic.phase("n2"), clinic.effects("n2")[-2:]) == (Phase.IN_SERVICE, ["validate", "resume"])
    assert "GPU GPU-2-b is forgiven by ada, and may come back" in clinic.told("n2")
    clinic.store.close()
    clinic.open()
    assert clinic.store.book.lemons == frozenset()


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


def test_a_node_that_comes_back_by_itself_is_only_validated(clinic_of: MakeClinic):
    clinic = clinic_of(gone_s=60.0)
    clinic.cluster.power_off("n2")
    clinic.rounds(10)
    clinic.cluster.nodes["n2"].machine.on = True
    clinic.settle()
    assert clinic.effects("n2") == ["down", "validate", "resume"]


def test_what_only_a_person_can_mend_is_waited_for_and_validated_when_it_is_over(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.DRAIN, code="full")
    clinic.settle()
    clinic.rounds(600)
    assert clinic.phase("n2") is Phase.GIVEN_UP
    assert clinic.effects("n2") == ["drain"]
    assert "needs a person" in clinic.told("n2")[-1]
    clinic.cluster.nodes["n2"].machine.cured_by = None
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]


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


# ---- others have the last word


def test_someone_else_s_drain_is_never_touched(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.someone_drains("n2")
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(100)
    clinic.cluster.power_off("n2")
    clinic.rounds(100)
    assert clinic.effects("n2") == []
    assert clinic.reason("n2") == "my own reason"
    assert "left alone, someone else keeps it out of service" in clinic.told("n2")[0]


def test_a_node_that_someone_takes_over_is_let_go(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
    clinic.round()
    clinic.cluster.someone_drains("n2", "hands off")
    clinic.cluster.end(7)
    clinic.settle()
    assert clinic.effects("n2") == ["drain"]
    assert clinic.phase("n2") is Phase.IN_SERVICE
    assert clinic.cluster.forbidden == []


def test_a_node_that_someone_returns_in_spite_of_its_fault_is_not_fought_over(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
    clinic.round()
    node = clinic.cluster.nodes["n2"]
    node.flags, node.reason = frozenset(), ""
    clinic.rounds(50)
    assert clinic.effects("n2") == ["drain"]
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="95")
    clinic.round()
    assert clinic.effects("n2") == ["drain", "drain"], "another fault is another matter"


@pytest.mark.parametrize("remembered", [True, False])
def test_a_drain_of_ours_that_is_older_than_the_node_s_boot_is_stale_and_it_is_only_validated(
    clinic_of: MakeClinic, remembered: bool
):
    """By its agent's word for the boot, or, where nobody remembers the drain, by Slurm's times."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    if remembered:
        clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
        clinic.rounds(3)
    else:
        node = clinic.cluster.nodes["n2"]
        node.flags, node.reason, node.reason_at = frozenset({NodeFlag.DRAIN}), "dalsegno:reset:ecc[dbe] bits", 1000
        node.booted_at = 2000
    clinic.cluster.nodes["n2"].machine = clinic.cluster.machine()  # somebody has booted it meanwhile
    clinic.cluster.end(7)
    clinic.settle()
    assert clinic.effects("n2") == (["drain"] if remembered else []) + ["validate", "resume"]


def test_a_drain_of_ours_that_nobody_remembers_is_taken_up(clinic_of: MakeClinic):
    clinic = clinic_of()
    node = clinic.cluster.nodes["n2"]
    node.flags, node.reason = frozenset({NodeFlag.DRAIN}), "dalsegno:reset:ecc[dbe] two bits"
    clinic.settle()
    assert clinic.effects("n2") == ["evidence", "reset", "validate", "resume"]


# ---- what Slurm itself takes out of service


@pytest.mark.parametrize(
    "reason",
    [
        "Prolog error", "Epilog error", "Kill task failed", "batch job complete failure", "Not responding",
        "Low RealMemory (reported:900 < 100.00% of configured:1000)", "Low socket*core*thread count, Low CPUs",
        "gres/gpu count reported lower than configured (7 < 8)",
    ],
)  # fmt: skip
def test_a_node_that_slurm_itself_drains_is_validated_and_returned(clinic_of: MakeClinic, reason: str):
    clinic = clinic_of()
    clinic.cluster.slurm_drains("n2", reason)
    clinic.round()
    assert clinic.reason("n2").startswith("dalsegno:drain:slurm[") and clinic.reason("n2").endswith(f"] {reason}")
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]
    assert clinic.phase("n2") is Phase.IN_SERVICE


def test_a_node_that_slurm_missed_and_that_is_back_is_validated_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    node = clinic.cluster.nodes["n2"]
    node.down, node.reason, node.user = True, "Node unexpectedly rebooted", "slurm"
    clinic.settle()
    assert (clinic.effects("n2")[-1], clinic.phase("n2")) == ("resume", Phase.IN_SERVICE)


@pytest.mark.parametrize(
    ("reason", "user"),
    [("Prolog error", "ada"), ("Prolog error: see ticket 7", "root"), ("NHC: disk", "root"), ("Kill task failed", "")],
)
def test_what_a_person_writes_is_never_touched_whatever_the_words(clinic_of: MakeClinic, reason: str, user: str):
    clinic = clinic_of()
    clinic.cluster.slurm_drains("n2", reason)
    clinic.cluster.nodes["n2"].user = user
    clinic.rounds(50)
    assert (clinic.effects("n2"), clinic.reason("n2")) == ([], reason)


def test_what_slurm_drains_again_and_again_is_left_to_a_person(clinic_of: MakeClinic):
    clinic = clinic_of()
    for _ in range(3):
        clinic.cluster.slurm_drains("n2", "Prolog error")
        clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"] * 2
    assert clinic.reason("n2") == "Prolog error"
    assert clinic.told("n2")[-1].endswith("3 times today (Prolog error): a person is needed")


def test_processes_that_cannot_be_killed_twice_a_day_cost_a_boot(clinic_of: MakeClinic):
    clinic = clinic_of()
    for _ in range(2):
        clinic.cluster.slurm_drains("n2", "Kill task failed")
        clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume", "drain", "evidence", "reboot", "validate", "resume"]


def test_a_node_that_slurm_drains_keeps_its_jobs_and_its_own_fault_counts_more(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.slurm_drains("n2")
    clinic.rounds(50)
    assert clinic.effects("n2") == ["drain"]
    clinic.cluster.slurm_drains("n3")
    clinic.cluster.break_gpu("n3", Remedy.REBOOT)
    clinic.cluster.end(7)
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]
    assert clinic.effects("n3") == ["drain", "evidence", "reboot", "validate", "resume"]


def test_where_a_platform_looks_after_slurm_s_drains_itself_they_are_left_alone(clinic_of: MakeClinic):
    clinic = clinic_of(slurm_users=frozenset())
    clinic.cluster.slurm_drains("n2")
    clinic.rounds(20)
    assert clinic.done == []


# ---- it is we who see nothing


def test_a_controller_that_sees_no_node_any_more_takes_it_for_its_own_fault(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.blind = True
    clinic.rounds(500)
    assert [clinic.effects(node) for node in clinic.cluster.nodes] == [[]] * 4
    assert len(clinic.told()) == 1 and "a fault of the controller's own network" in clinic.told()[0]
    clinic.cluster.blind = False
    clinic.settle()
    assert clinic.told()[1:] == ["nodes are seen again; goes on"]
    clinic.cluster.end(7)
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume", "and it looks after them as before"


def test_nodes_that_are_heard_later_than_others_when_we_see_again_are_not_lost(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.blind = True
    clinic.rounds(20)
    clinic.cluster.blind = False
    for late in ("n3", "n4"):
        clinic.cluster.nodes[late].late = True
    clinic.rounds(10)
    for late in ("n3", "n4"):
        clinic.cluster.nodes[late].late = False
    clinic.settle()
    assert [clinic.effects(node) for node in clinic.cluster.nodes] == [[]] * 4
    clinic.cluster.nodes["n4"].late = True
    clinic.rounds(3)
    assert clinic.effects("n4")[:1] == ["down"], "one that is lost after that is lost"


def test_what_was_under_our_hands_when_we_saw_nothing_is_given_its_time_anew(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(3)
    assert clinic.effects("n2")[-1] == "reboot"
    clinic.cluster.blind = True
    clinic.rounds(200)
    clinic.cluster.blind, clinic.cluster.nodes["n2"].machine.on = False, False  # the others are heard first
    clinic.rounds(3)
    clinic.cluster.nodes["n2"].machine.on = True
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reboot", "validate", "resume"]


def test_a_controller_that_is_started_anew_while_it_sees_nothing_does_nothing_either(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.blind = True
    clinic.rounds(3)
    clinic.store.close()
    clinic.open()
    clinic.rounds(50)
    assert len(clinic.told()) == 1 and clinic.cluster.nodes["n1"].effects == []


def test_nodes_that_slurm_has_set_down_too_are_really_gone(clinic_of: MakeClinic):
    clinic = clinic_of(max_out=1.0)
    for node in clinic.cluster.nodes:
        clinic.cluster.power_off(node)
    clinic.rounds(200)
    assert [clinic.effects(node) for node in clinic.cluster.nodes] == [[]] * 4
    clinic.wait(300)
    clinic.settle()
    assert all(clinic.effects(node)[-1] == "resume" for node in clinic.cluster.nodes)
    assert "Slurm has set the silent nodes down too: they are gone; goes on" in clinic.told()


def test_one_host_that_answers_shows_that_we_see(clinic_of: MakeClinic):
    clinic = clinic_of(3)
    clinic.cluster.nodes["n1"].agent = False  # its agent is dead, its host answers
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume"


def test_nodes_that_are_late_together_with_the_first_that_is_missed_are_not_seen(clinic_of: MakeClinic):
    """They are found to be gone one after the other; the first must not be taken for the only one."""
    clinic = clinic_of()
    clinic.cluster.power_off("n1")
    for quiet_s, blind in ((0.4, False), (1.0, True)):
        facts = clinic.cluster.facts()
        assert facts.nodes is not None
        late = {name: replace(node, agent=replace(node.agent, quiet_s=quiet_s)) for name, node in facts.nodes.items()}
        assert is_blind(replace(facts, nodes=late), clinic.store.book) is blind


def test_a_silent_node_is_missed_only_when_others_were_heard_well_after_its_last_word(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.power_off("n1")
    for heard_after_s, missed in ((0.5, False), (1.0, True)):
        facts = clinic.cluster.facts()
        assert facts.nodes is not None
        last = replace(facts.nodes["n1"].agent, heard=clinic.cluster.now - heard_after_s)
        nodes = {**facts.nodes, "n1": replace(facts.nodes["n1"], agent=last)}
        actions = decide(replace(facts, nodes=nodes), clinic.store.book, clinic.policy, clinic.cluster.now)
        assert [type(action) for action in actions] == ([SetDown] if missed else [])


# ---- how much may be done


def test_at_most_a_quarter_of_a_partition_is_out_at_a_time(clinic_of: MakeClinic):
    clinic = clinic_of(8, can=frozenset())
    for name in clinic.cluster.nodes:
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.settle()
    out = [name for name in clinic.cluster.nodes if clinic.effects(name)]
    assert len(out) == 2
    assert "stays in service: 2 of 8 nodes of train are out already" in clinic.told("n8")[0]


def test_at_most_four_nodes_of_a_partition_are_taken_in_an_hour(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0)
    for name in clinic.cluster.nodes:
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.settle()
    assert len([name for name in clinic.cluster.nodes if clinic.effects(name)]) == 4
    clinic.wait(3600)
    clinic.settle()
    assert len([name for name in clinic.cluster.nodes if clinic.effects(name)]) == 8


def test_a_person_who_says_go_on_allows_as_many_again_within_the_hour(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0, per_hour=2)
    for name in ("n1", "n2", "n3"):
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.settle()
    assert clinic.phase("n3") is Phase.SUSPECTED
    assert "`dalsegno automation resume` allows as many again" in clinic.told("n3")[-1]
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert clinic.effects("n3")[-1] == "resume"


def test_observing_it_only_says_once_what_it_would_do(clinic_of: MakeClinic):
    clinic = clinic_of(mode="observe")
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(20)
    assert clinic.effects("n2") == []
    assert clinic.told("n2") == ["suspected: only observing; would drain it: xid[79]: GPU has fallen off the bus"]


def test_paused_it_begins_nothing_and_goes_on_when_resumed(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(2)
    clinic.store.pause(True, "ada", clinic.cluster.now)
    clinic.rounds(200)
    assert clinic.effects("n2") == ["drain", "evidence"]
    assert clinic.told("n2")[-1].startswith("paused; would reboot it")
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume"


def test_without_slurm_s_word_nothing_is_done(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.slurm_answers = False
    clinic.cluster.power_off("n2")
    clinic.cluster.break_gpu("n3", Remedy.REPLACE)
    clinic.rounds(100)
    assert clinic.done == []


def test_more_than_the_cluster_file_allows_is_not_done_for_a_check(clinic_of: MakeClinic):
    clinic = clinic_of(caps={"xid": Remedy.REBOOT})
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.settle()
    assert "replace" not in clinic.effects("n2")
    assert "no more than reboot may be done for xid" in clinic.told("n2")[-1]


def test_a_check_that_is_off_says_nothing(clinic_of: MakeClinic):
    clinic = clinic_of(off=frozenset({"xid"}))
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(20)
    assert clinic.done == []


# ---- jobs


def test_a_job_that_slurm_requeues_is_started_without_the_wait(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.power_off("n2")
    clinic.rounds(10)
    assert clinic.cluster.queue[7].reason == "Priority"
    clinic.cluster.start(7, "n3")
    clinic.round()
    assert "job 7 runs again on n3" in clinic.told("n2")


def test_a_job_that_ends_with_its_node_is_left_alone_and_told_of(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.power_off("n2")
    clinic.round()
    clinic.cluster.end(7, JobState.NODE_FAIL)
    clinic.settle()
    text = "job 7 has ended with its node (NODE_FAIL): it may not be requeued, and is left alone"
    assert text in clinic.told("n2")


def test_a_job_that_cannot_go_on_is_requeued_and_one_that_may_not_be_is_waited_for(clinic_of: MakeClinic):
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
    assert len([text for text in clinic.told("n3") if "could not requeue job 8" in text]) == 1


def test_a_run_s_job_is_left_to_the_run(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.break_gpu("n2", Remedy.REBOOT, code="79")
    clinic.rounds(50)
    assert clinic.cluster.queue[7].state is JobState.RUNNING


def test_a_node_that_a_run_has_left_is_taken_from_it_and_mended(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.break_gpu("n2", Remedy.REBOOT, code="79")
    clinic.rounds(20)
    assert clinic.effects("n2") == ["drain"], "the run still needs it"
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main left=n2,n9")
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "down", "evidence", "reboot", "validate", "resume"]
    assert clinic.cluster.queue[7].nodes == ("n1",) and clinic.cluster.forbidden == []


def test_jobs_that_are_over_do_not_hold_a_node_whose_slurmd_is_dead(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2", comment="dalsegno:join")
    clinic.cluster.kill_slurmd("n2")
    clinic.rounds(20)
    assert clinic.effects("n2") == ["drain"], "what runs may end"
    clinic.cluster.end(7, JobState.COMPLETING)
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "down", "evidence", "reboot", "validate", "resume"]


def test_a_node_on_which_jobs_fail_at_once_is_taken_out_and_validated(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in (1, 2, 3):
        clinic.cluster.start(job, "n2")
        clinic.cluster.end(job, JobState.FAILED)
    clinic.round()
    assert clinic.reason("n2") == "dalsegno:drain:black-hole 3 jobs failed here as soon as they had started"
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]
    assert clinic.phase("n2") is Phase.IN_SERVICE


def test_a_job_that_fails_everywhere_makes_no_node_suspect(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):
        clinic.cluster.start(job, f"n{job % 4 + 1}", name="broken-script")
        clinic.cluster.end(job, JobState.FAILED)
    clinic.rounds(20)
    assert clinic.done == []


def test_one_job_that_fails_again_and_again_where_slurm_puts_it_makes_no_node_suspect(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):
        clinic.cluster.start(job, "n1", name="bad-image")
        clinic.cluster.end(job, JobState.FAILED)
    clinic.rounds(20)
    assert clinic.done == []

    clinic.cluster.start(9, "n2", name="bad-image")  # elsewhere it does well: so it is the node
    clinic.cluster.end(9)
    clinic.round()
    assert clinic.effects("n1")[0] == "drain"


def test_jobs_of_runs_that_cannot_start_make_no_node_suspect(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):
        clinic.cluster.start(job, "n3", comment="dalsegno:join")
        clinic.cluster.end(job, JobState.FAILED)
    clinic.rounds(20)
    assert clinic.done == []


def test_a_node_on_which_jobs_do_well_between_those_that_fail_is_no_suspect(clinic_of: MakeClinic):
    clinic = clinic_of()
    for job in range(1, 9):
        clinic.cluster.start(job, "n1")
        clinic.cluster.end(job, JobState.COMPLETED if job % 3 == 0 else JobState.FAILED)
        clinic.wait(1)
    clinic.rounds(20)
    assert clinic.done == []


# ---- spares


def spare_clinic(clinic_of: MakeClinic) -> Clinic:
    clinic = clinic_of(4, spares=frozenset({"n4"}))
    node = clinic.cluster.nodes["n4"]
    node.flags, node.reason, node.effects[:] = frozenset({NodeFlag.DRAIN}), SPARE_REASON, []
    clinic.settle()
    return clinic


def test_a_spare_is_validated_and_kept(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.SPARE, SPARE_REASON)
    assert clinic.effects("n4") == ["validate"]
    clinic.wait(86400)
    clinic.settle()
    assert clinic.effects("n4") == ["validate", "validate"], "burned in again every day"


def test_a_spare_is_released_for_the_job_that_joins_a_run_and_kept_again_after_it(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start(9, comment="dalsegno:join")
    clinic.round()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.LENT, "")
    assert clinic.cluster.queue[9].reservation == "n4", "for this job"
    clinic.cluster.start(9, "n4", comment="dalsegno:join")
    clinic.rounds(20)
    clinic.cluster.end(9)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.SPARE, SPARE_REASON)


@pytest.mark.parametrize("running", [False, True])
def test_a_lent_spare_that_a_restarted_slurmctld_drains_again_is_given_back_to_its_job(
    clinic_of: MakeClinic, running: bool
):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start(9, comment="dalsegno:join")
    clinic.round()
    if running:
        clinic.cluster.start(9, "n4", comment="dalsegno:join")
    node = clinic.cluster.nodes["n4"]
    node.flags, node.reason = frozenset({NodeFlag.DRAIN}), SPARE_REASON
    clinic.rounds(2)
    assert (node.flags, clinic.phase("n4")) == (frozenset(), Phase.LENT)
    assert clinic.cluster.queue[9].state is (JobState.RUNNING if running else JobState.PENDING)
    clinic.cluster.end(9)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.SPARE, SPARE_REASON)


def test_a_spare_that_cannot_be_released_is_tried_again_after_a_while_and_not_at_once(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start(9, comment="dalsegno:join")
    facts = clinic.cluster.facts()
    del clinic.cluster.queue[9]  # Slurm does not know it any more when it is told
    for _ in range(10):
        clinic.cluster.now += 0.1
        clinic.healer.round(replace(facts, slurm_at=clinic.cluster.now))
    assert len([text for text in clinic.told("n4") if "could not release" in text]) == 1


def test_other_jobs_get_no_spare(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.start(9)
    clinic.rounds(20)
    assert clinic.phase("n4") is Phase.SPARE


def test_a_spare_whose_agent_was_silent_for_a_moment_is_still_one(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    for lent in (False, True):
        if lent:
            clinic.cluster.start(9, comment="dalsegno:join")
            clinic.round()
            clinic.cluster.start(9, "n4", comment="dalsegno:join")
        clinic.cluster.nodes["n4"].agent = False  # the host answers, the agent does not
        clinic.rounds(3)
        assert clinic.phase("n4") is (Phase.LENT if lent else Phase.SPARE)
        clinic.cluster.nodes["n4"].agent = True
        clinic.rounds(3)
        assert clinic.phase("n4") is (Phase.LENT if lent else Phase.SPARE)


def test_a_broken_spare_is_mended_and_is_a_spare_again(clinic_of: MakeClinic):
    clinic = spare_clinic(clinic_of)
    clinic.cluster.break_gpu("n4", Remedy.REBOOT)
    clinic.settle()
    assert (clinic.phase("n4"), clinic.reason("n4")) == (Phase.SPARE, SPARE_REASON)
    assert clinic.effects("n4").count("reboot") == 1
