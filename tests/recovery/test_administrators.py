"""Tests that administrators take precedence over recovery: for nodes they drain, take over or return."""

from __future__ import annotations

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.slurm.facts import NodeFlag
from tests.recovery.clinic import MakeClinic


def test_a_drain_of_an_administrator_is_never_changed(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.someone_drains("n2")
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(100)
    clinic.cluster.power_off("n2")
    clinic.rounds(100)
    assert clinic.effects("n2") == []
    assert clinic.reason("n2") == "my own reason"
    assert "no action: an administrator keeps it out of service" in clinic.texts("n2")[0]


def test_a_node_taken_over_by_an_administrator_is_released(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
    clinic.round()
    clinic.cluster.someone_drains("n2", "hands off")
    clinic.cluster.end(7)
    clinic.settle()
    assert clinic.effects("n2") == ["drain"]
    assert clinic.phase("n2") is NodePhase.IN_SERVICE
    assert clinic.cluster.forbidden == []


def test_a_node_returned_by_an_administrator_is_not_drained_for_the_same_fault(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
    clinic.round()
    clinic.cluster.someone_resumes("n2")
    clinic.rounds(50)
    assert clinic.effects("n2") == ["drain"]
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="95")
    clinic.round()
    assert clinic.effects("n2") == ["drain", "drain"], "another fault counts"


def test_all_faults_of_a_returned_node_are_accepted(clinic_of: MakeClinic):
    """A second symptom of the same fault does not count as new."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    machine = clinic.cluster.nodes["n2"].machine
    machine.also = ("gpu-clocks",)
    clinic.cluster.break_gpu("n2", Remedy.DRAIN, code="hot")
    clinic.round()
    clinic.cluster.someone_resumes("n2")
    clinic.rounds(50)
    assert clinic.effects("n2") == ["drain"]
    assert clinic.store.records.get("n2").excuses == ("gpu-clocks[hot]", "xid[hot]")
    clinic.store.close()
    clinic.open()
    clinic.rounds(50)
    assert clinic.effects("n2") == ["drain"], "a new controller knows it too"
    machine.cured_by = None
    clinic.rounds(2)
    assert clinic.texts("n2")[-1] == "in service: its accepted faults are over"
    clinic.cluster.break_gpu("n2", Remedy.DRAIN, code="hot")
    clinic.round()
    assert clinic.effects("n2") == ["drain", "drain"], "a new occurrence counts"


def test_faults_during_an_administrators_drain_are_accepted_on_return(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.someone_drains("n2")
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(3)
    clinic.cluster.someone_resumes("n2")
    clinic.rounds(50)
    assert clinic.effects("n2") == []
    assert len(clinic.texts("n2")) == 1
    clinic.cluster.power_off("n2")
    clinic.round()
    assert clinic.effects("n2") == ["down"], "another fault counts"


def test_held_back_faults_are_accepted_after_an_administrators_drain(clinic_of: MakeClinic):
    clinic = clinic_of(per_hour=0)
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(2)
    assert clinic.phase("n2") is NodePhase.SUSPECTED
    clinic.cluster.someone_drains("n2")
    clinic.rounds(2)
    clinic.cluster.someone_resumes("n2")
    clinic.rounds(5)
    assert clinic.texts("n2")[-1] == "in service: its faults were accepted by the administrator who returned it"
    assert clinic.store.records.get("n2").excuses == ("xid[79]",)


def test_faults_during_a_maintenance_reservation_are_not_accepted(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.nodes["n2"].flags = frozenset({NodeFlag.MAINTENANCE})
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(3)
    assert clinic.effects("n2") == []
    clinic.cluster.nodes["n2"].flags = frozenset()
    clinic.round()
    assert clinic.effects("n2") == ["drain"]


def test_an_unknown_check_does_not_end_an_accepted_fault(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
    clinic.round()
    clinic.cluster.someone_resumes("n2")
    clinic.round()
    machine = clinic.cluster.nodes["n2"].machine
    machine.silent = True
    clinic.rounds(5)
    machine.silent = False
    clinic.rounds(5)
    assert clinic.effects("n2") == ["drain"]


@pytest.mark.parametrize("remembered", [True, False])
def test_after_a_reboot_by_others_a_drained_node_is_only_validated(clinic_of: MakeClinic, remembered: bool):
    """The reboot is known from the agent's boot id or, without a record of the drain, from Slurm's times."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    if remembered:
        clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
        clinic.rounds(3)
    else:
        node = clinic.cluster.nodes["n2"]
        node.flags, node.reason, node.reason_at = frozenset({NodeFlag.DRAIN}), "dalsegno:reset:ecc[dbe] bits", 1000
        node.booted_at = 2000
    clinic.cluster.nodes["n2"].machine = clinic.cluster.machine()  # an administrator has rebooted it
    clinic.cluster.end(7)
    clinic.settle()
    assert clinic.effects("n2") == (["drain"] if remembered else []) + ["validate", "resume"]


def test_a_drain_of_ours_without_a_record_is_taken_over(clinic_of: MakeClinic):
    clinic = clinic_of()
    node = clinic.cluster.nodes["n2"]
    node.flags, node.reason = frozenset({NodeFlag.DRAIN}), "dalsegno:reset:ecc[dbe] two bits"
    clinic.settle()
    assert clinic.effects("n2") == ["evidence", "reset", "validate", "resume"]
