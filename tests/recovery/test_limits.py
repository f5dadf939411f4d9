"""Tests of the limits of recovery: budgets, observing, pausing, and the cluster file."""

from __future__ import annotations

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.phase import HeldAction, NodePhase
from dalsegno.recovery.fakes import FakeNode
from tests.recovery.clinic import MakeClinic


def test_at_most_a_quarter_of_a_partition_is_out_at_a_time(clinic_of: MakeClinic):
    clinic = clinic_of(8, can=frozenset())
    for name in clinic.cluster.nodes:
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.settle()
    out = [name for name in clinic.cluster.nodes if clinic.effects(name)]
    assert len(out) == 2
    assert "no action: 2 of 8 nodes of train are out of service already" in clinic.texts("n8")[0]


def test_at_most_four_nodes_of_a_partition_are_taken_out_per_hour(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0)
    for name in clinic.cluster.nodes:
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.settle()
    assert len([name for name in clinic.cluster.nodes if clinic.effects(name)]) == 4
    clinic.wait(3600)
    clinic.settle()
    assert len([name for name in clinic.cluster.nodes if clinic.effects(name)]) == 8


def test_resuming_resets_the_hourly_limit(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0, per_hour=2)
    for name in ("n1", "n2", "n3"):
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.settle()
    assert clinic.phase("n3") is NodePhase.SUSPECTED
    assert "`dalsegno automation resume` resets this limit" in clinic.texts("n3")[-1]
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert clinic.effects("n3")[-1] == "resume"


def test_in_observe_mode_each_action_is_reported_once(clinic_of: MakeClinic):
    clinic = clinic_of(mode="observe")
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(20)
    assert clinic.effects("n2") == []
    assert clinic.texts("n2") == ["suspected: only observing; would drain it: xid[79]: GPU has fallen off the bus"]


def test_in_observe_mode_nodes_are_reported_as_would_be_out(clinic_of: MakeClinic):
    clinic = clinic_of(mode="observe")
    for name in ("n2", "n3"):
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.rounds(20)
    assert clinic.texts("n2") == ["suspected: only observing; would drain it: xid[79]: GPU has fallen off the bus"]
    (text,) = clinic.texts("n3")
    assert text.endswith("; no action: 1 of 4 nodes of train would be out of service already")
    assert [clinic.store.records.get(name).held_back for name in ("n1", "n2", "n3")] == [
        HeldAction.NO,
        *[HeldAction.OBSERVING] * 2,
    ]


def test_a_remark_is_not_repeated_if_only_a_number_in_it_changes(clinic_of: MakeClinic):
    clinic = clinic_of(8, can=frozenset())
    for name in clinic.cluster.nodes:
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.settle()
    (text,) = clinic.texts("n8")
    assert "no action: 2 of 8 nodes" in text
    clinic.cluster.nodes["n9"] = FakeNode(clinic.cluster.machine(), ("train",))
    clinic.rounds(20)
    assert clinic.texts("n8") == [text]
    clinic.cluster.break_gpu("n8", Remedy.REBOOT, code="48")
    clinic.rounds(20)
    assert len(clinic.texts("n8")) == 2 and "xid[48]" in clinic.texts("n8")[1], "another fault is reported"


def test_the_reason_for_holding_back_is_kept_until_it_changes(clinic_of: MakeClinic):
    clinic = clinic_of(8, max_out=1.0, per_hour=1)
    clinic.store.pause(True, "ada", clinic.cluster.now)
    for name in ("n1", "n2"):
        clinic.cluster.break_gpu(name, Remedy.REBOOT)
    clinic.rounds(3)
    assert clinic.store.records.get("n1").held_back is HeldAction.PAUSED
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert [clinic.store.records.get(name).held_back for name in ("n1", "n2")] == [HeldAction.NO, HeldAction.HOUR]
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert clinic.store.records.get("n2").held_back is HeldAction.NO


def test_a_pause_starts_no_action_and_resuming_continues(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(2)
    clinic.store.pause(True, "ada", clinic.cluster.now)
    clinic.rounds(200)
    assert clinic.effects("n2") == ["drain", "evidence"]
    assert clinic.texts("n2")[-1].startswith("paused; would reboot it")
    clinic.store.pause(False, "ada", clinic.cluster.now)
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume"


def test_nothing_is_done_while_slurm_does_not_answer(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.slurm_answers = False
    clinic.cluster.power_off("n2")
    clinic.cluster.break_gpu("n3", Remedy.REPLACE)
    clinic.rounds(100)
    assert clinic.done == []


def test_the_cluster_file_limits_the_remedy_of_a_check(clinic_of: MakeClinic):
    clinic = clinic_of(caps={"xid": Remedy.REBOOT})
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.settle()
    assert "replace" not in clinic.effects("n2")
    assert "allows no more than reboot for xid" in clinic.texts("n2")[-1]


def test_a_disabled_check_is_ignored(clinic_of: MakeClinic):
    clinic = clinic_of(off=frozenset({"xid"}))
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(20)
    assert clinic.done == []
