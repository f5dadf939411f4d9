"""How much may be done: budgets, observing, pausing, what the cluster file allows."""

from __future__ import annotations

from dalsegno.health import Remedy
from dalsegno.recovery.phase import HeldAction, NodePhase
from tests.recovery.clinic import MakeClinic


def test_at_most_a_quarter_of_a_partition_is_out_at_a_time(clinic_of: MakeClinic):
    clinic = clinic_of(8, can=frozenset())
    for name in clinic.cluster.nodes:
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.settle()
    out = [name for name in clinic.cluster.nodes if clinic.effects(name)]
    assert len(out) == 2
    assert "no action: 2 of 8 nodes of train are out of service already" in clinic.told("n8")[0]


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
    assert clinic.phase("n3") is NodePhase.SUSPECTED
    assert "`dalsegno automation resume` resets this limit" in clinic.told("n3")[-1]
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert clinic.effects("n3")[-1] == "resume"


def test_observing_it_only_says_once_what_it_would_do(clinic_of: MakeClinic):
    clinic = clinic_of(mode="observe")
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(20)
    assert clinic.effects("n2") == []
    assert clinic.told("n2") == ["suspected: only observing; would drain it: xid[79]: GPU has fallen off the bus"]


def test_observing_it_does_not_say_that_nodes_are_out_when_they_only_would_be(clinic_of: MakeClinic):
    clinic = clinic_of(mode="observe")
    for name in ("n2", "n3"):
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.rounds(20)
    assert clinic.told("n2") == ["suspected: only observing; would drain it: xid[79]: GPU has fallen off the bus"]
    (told,) = clinic.told("n3")
    assert told.endswith("; no action: 1 of 4 nodes of train would be out of service already")
    assert [clinic.store.book.of(name).held_back for name in ("n1", "n2", "n3")] == [
        HeldAction.NO,
        *[HeldAction.OBSERVING] * 2,
    ]


def test_why_a_node_is_left_as_it_is_is_kept_until_it_is_not(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0, per_hour=1)
    clinic.store.pause(True, "ada", clinic.cluster.now)
    for name in ("n1", "n2"):
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.rounds(3)
    assert clinic.store.book.of("n1").held_back is HeldAction.PAUSED
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert [clinic.store.book.of(name).held_back for name in ("n1", "n2")] == [HeldAction.NO, HeldAction.HOUR]
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert clinic.store.book.of("n2").held_back is HeldAction.NO


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
    assert "allows no more than reboot for xid" in clinic.told("n2")[-1]


def test_a_check_that_is_off_says_nothing(clinic_of: MakeClinic):
    clinic = clinic_of(off=frozenset({"xid"}))
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(20)
    assert clinic.done == []
