"""Others have the last word: what someone else drains, takes over or returns is theirs."""

from __future__ import annotations

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.phase import Phase
from dalsegno.slurm import NodeFlag
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
