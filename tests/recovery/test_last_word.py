"""Others have the last word: what someone else drains, takes over or returns is theirs."""

from __future__ import annotations

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.phase import NodePhase
from dalsegno.slurm.facts import NodeFlag
from tests.recovery.clinic import MakeClinic


def test_someone_else_s_drain_is_never_touched(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.someone_drains("n2")
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(100)
    clinic.cluster.power_off("n2")
    clinic.rounds(100)
    assert clinic.effects("n2") == []
    assert clinic.reason("n2") == "my own reason"
    assert "no action: an administrator keeps it out of service" in clinic.told("n2")[0]


def test_a_node_that_someone_takes_over_is_let_go(clinic_of: MakeClinic):
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


def test_a_node_that_someone_returns_in_spite_of_its_fault_is_not_fought_over(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="48")
    clinic.round()
    clinic.cluster.someone_resumes("n2")
    clinic.rounds(50)
    assert clinic.effects("n2") == ["drain"]
    clinic.cluster.break_gpu("n2", Remedy.RESET, code="95")
    clinic.round()
    assert clinic.effects("n2") == ["drain", "drain"], "another fault is another matter"


def test_all_that_is_wrong_when_someone_returns_a_node_is_left_to_them(clinic_of: MakeClinic):
    """The second symptom of the same fault is no other matter."""
    clinic = clinic_of()
    clinic.cluster.start(7, "n2")
    machine = clinic.cluster.nodes["n2"].machine
    machine.also = ("gpu-clocks",)
    clinic.cluster.break_gpu("n2", Remedy.DRAIN, code="hot")
    clinic.round()
    clinic.cluster.someone_resumes("n2")
    clinic.rounds(50)
    assert clinic.effects("n2") == ["drain"]
    assert clinic.store.book.of("n2").excuses == ("gpu-clocks[hot]", "xid[hot]")
    clinic.store.close()
    clinic.open()
    clinic.rounds(50)
    assert clinic.effects("n2") == ["drain"], "a controller that was started again knows it too"
    machine.cured_by = None
    clinic.rounds(2)
    assert clinic.told("n2")[-1] == "in service: its accepted faults are over"
    clinic.cluster.break_gpu("n2", Remedy.DRAIN, code="hot")
    clinic.round()
    assert clinic.effects("n2") == ["drain", "drain"], "once more is another matter"


def test_what_befalls_a_node_that_someone_else_has_drained_is_theirs_when_they_return_it(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.someone_drains("n2")
    clinic.cluster.break_gpu("n2", Remedy.REPLACE)
    clinic.rounds(3)
    clinic.cluster.someone_resumes("n2")
    clinic.rounds(50)
    assert clinic.effects("n2") == []
    assert len(clinic.told("n2")) == 1
    clinic.cluster.power_off("n2")
    clinic.round()
    assert clinic.effects("n2") == ["down"], "another fault is another matter"


def test_what_was_held_back_is_theirs_too_once_someone_has_had_the_node_out(clinic_of: MakeClinic):
    clinic = clinic_of(per_hour=0)
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(2)
    assert clinic.phase("n2") is NodePhase.SUSPECTED
    clinic.cluster.someone_drains("n2")
    clinic.rounds(2)
    clinic.cluster.someone_resumes("n2")
    clinic.rounds(5)
    assert clinic.told("n2")[-1] == "in service: its faults were accepted by the administrator who returned it"
    assert clinic.store.book.of("n2").excuses == ("xid[79]",)


def test_a_fault_that_came_while_a_node_was_only_reserved_is_excused_by_nobody(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.nodes["n2"].flags = frozenset({NodeFlag.MAINTENANCE})
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(3)
    assert clinic.effects("n2") == []
    clinic.cluster.nodes["n2"].flags = frozenset()
    clinic.round()
    assert clinic.effects("n2") == ["drain"]


def test_an_agent_that_says_nothing_of_a_fault_does_not_say_that_it_is_over(clinic_of: MakeClinic):
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
