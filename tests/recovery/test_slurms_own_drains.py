"""Tests of nodes that Slurm itself takes out of service."""

from __future__ import annotations

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.decisions.phase import NodePhase
from tests.recovery.clinic import MakeClinic


@pytest.mark.parametrize(
    "reason",
    [
        "Prolog error", "Epilog error", "Kill task failed", "batch job complete failure", "Not responding",
        "Low RealMemory (reported:900 < 100.00% of configured:1000)", "Low socket*core*thread count, Low CPUs",
        "gres/gpu count reported lower than configured (7 < 8)",
    ],
)  # fmt: skip
def test_a_node_drained_by_slurm_is_validated_and_returned(clinic_of: MakeClinic, reason: str):
    clinic = clinic_of()
    clinic.cluster.slurm_drains("n2", reason)
    clinic.round()
    assert clinic.reason("n2").startswith("dalsegno:drain:slurm[") and clinic.reason("n2").endswith(f"] {reason}")
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"]
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_node_set_down_by_slurm_is_validated_and_returned(clinic_of: MakeClinic):
    clinic = clinic_of()
    node = clinic.cluster.nodes["n2"]
    node.down, node.reason, node.user = True, "Node unexpectedly rebooted", "slurm"
    clinic.settle()
    assert (clinic.effects("n2")[-1], clinic.phase("n2")) == ("resume", NodePhase.IN_SERVICE)


@pytest.mark.parametrize(
    ("reason", "user"),
    [("Prolog error", "ada"), ("Prolog error: see ticket 7", "root"), ("NHC: disk", "root"), ("Kill task failed", "")],
)
def test_a_drain_of_a_person_is_never_changed_whatever_its_reason(clinic_of: MakeClinic, reason: str, user: str):
    clinic = clinic_of()
    clinic.cluster.slurm_drains("n2", reason)
    clinic.cluster.nodes["n2"].user = user
    clinic.rounds(50)
    assert (clinic.effects("n2"), clinic.reason("n2")) == ([], reason)


def test_a_node_drained_repeatedly_by_slurm_is_left_to_an_administrator(clinic_of: MakeClinic):
    clinic = clinic_of()
    for _ in range(3):
        clinic.cluster.slurm_drains("n2", "Prolog error")
        clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume"] * 2
    assert clinic.reason("n2") == "Prolog error"
    assert clinic.texts("n2")[-1].endswith("3 times today (Prolog error): an administrator must look at it")


def test_the_second_kill_task_failure_in_a_day_leads_to_a_reboot(clinic_of: MakeClinic):
    clinic = clinic_of()
    for _ in range(2):
        clinic.cluster.slurm_drains("n2", "Kill task failed")
        clinic.settle()
    assert clinic.effects("n2") == ["drain", "validate", "resume", "drain", "evidence", "reboot", "validate", "resume"]


def test_a_node_drained_by_slurm_keeps_its_jobs_and_its_own_faults_take_precedence(clinic_of: MakeClinic):
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


def test_drains_by_slurm_are_left_alone_if_the_platform_handles_them(clinic_of: MakeClinic):
    clinic = clinic_of(slurm_users=frozenset())
    clinic.cluster.slurm_drains("n2")
    clinic.rounds(20)
    assert clinic.done == []
