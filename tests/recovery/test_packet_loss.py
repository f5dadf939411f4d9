"""Tests of nodes whose network loses packets. They are suspected during the loss, and the events name the cause."""

from __future__ import annotations

import pytest

from dalsegno.health import Finding, NodeReport, Result, passed, warned
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.decisions.actions import SetDown
from dalsegno.recovery.decisions.facts import NodeFacts
from dalsegno.recovery.decisions.judge import Suspicion, find_fault, find_suspicion, is_reported
from dalsegno.recovery.decisions.phase import NodePhase
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import Subject, Topic
from dalsegno.recovery.decisions.records import NodeRecord
from dalsegno.slurm.facts import NodeInfo, NodeState
from dalsegno.wire.liveness import Presence
from tests.recovery.clinic import STEP_S, Clinic, MakeClinic

SEEN = NodeRecord("n2", seen=True, last_boot="boot-1")


def test_repeated_silence_is_reported_once(clinic_of: MakeClinic):
    clinic = clinic_of()
    node = clinic.cluster.nodes["n2"]
    for _ in range(10):
        node.quiet = True
        clinic.rounds(2)
        node.quiet = False
        clinic.rounds(3)
    assert clinic.texts("n2") == ["suspected: its agent is silent"]
    clinic.rounds(int(clinic.policy.steady_s[0] / STEP_S))
    assert clinic.phase("n2") is NodePhase.IN_SERVICE
    assert clinic.texts("n2")[1:] == ["in service: no fault any more"]


def silences(clinic: Clinic, count: int, well_s: float) -> None:
    """Make n2 fall silent this many times, with `well_s` seconds of contact after each silence."""
    for _ in range(count):
        clinic.cluster.nodes["n2"].quiet = True
        clinic.rounds(2)
        clinic.cluster.nodes["n2"].quiet = False
        clinic.rounds(int(well_s / STEP_S))


def test_each_relapse_requires_a_longer_time_without_faults(clinic_of: MakeClinic):
    clinic = clinic_of()
    silences(clinic, 100, well_s=12)  # more than twenty minutes with packet loss
    assert clinic.texts("n2") == [
        "suspected: its agent is silent",
        "in service: no fault any more",
        "suspected: its agent is silent",
    ]
    clinic.rounds(int(clinic.policy.steady_s[1] / STEP_S))
    assert clinic.phase("n2") is NodePhase.IN_SERVICE
    for steady_s in (*clinic.policy.steady_s[2:], clinic.policy.steady_s[-1]):
        silences(clinic, 1, well_s=steady_s - 2 * STEP_S)
        assert clinic.phase("n2") is NodePhase.SUSPECTED, f"no earlier than {steady_s} s"
        clinic.rounds(5)
        assert clinic.phase("n2") is NodePhase.IN_SERVICE, f"after {steady_s} s"


def test_a_long_time_in_service_resets_the_relapses(clinic_of: MakeClinic):
    clinic = clinic_of()
    silences(clinic, 2, well_s=clinic.policy.steady_s[1] + 5)
    assert clinic.phase("n2") is NodePhase.IN_SERVICE
    clinic.wait(clinic.policy.relapse_s)
    silences(clinic, 1, well_s=clinic.policy.steady_s[0] + 2)
    assert clinic.phase("n2") is NodePhase.IN_SERVICE


def test_a_power_cut_on_a_suspected_node_is_handled_at_once(clinic_of: MakeClinic):
    clinic = clinic_of()
    silences(clinic, 5, well_s=8)
    assert clinic.phase("n2") is NodePhase.SUSPECTED
    clinic.cluster.power_off("n2")
    assert any(isinstance(action, SetDown) for action in clinic.round())


def test_a_changed_number_of_lost_packets_is_not_reported_again():
    own = NodeRecord("n2", about=Subject(Topic.AGENT_SILENT, network=True))
    assert is_reported(Subject(Topic.AGENT_SILENT, network=True), own)
    assert is_reported(Subject(Topic.AGENT_SILENT), own)
    assert not is_reported(Subject(Topic.AGENT_DEAD, network=True), own)
    without = NodeRecord("n2", about=Subject(Topic.AGENT_SILENT))
    assert not is_reported(Subject(Topic.AGENT_SILENT, network=True), without), "the network warning is new"


def test_a_further_quick_failure_is_reported():
    own = NodeRecord("n2", about=Subject(Topic.QUICK_FAILURES, count=3))
    assert is_reported(Subject(Topic.QUICK_FAILURES, count=3), own)
    assert not is_reported(Subject(Topic.QUICK_FAILURES, count=4), own)


@pytest.mark.parametrize(
    ("said", "more"),
    [(warned("16 of 47 retransmitted"), "; before that, 16 of 47 retransmitted"), (passed("few retransmissions"), "")],
)
def test_silence_is_reported_with_the_last_network_warning(said: Result, more: str):
    report = NodeReport("n2", "boot-1", (Finding("network", said, 1.0),), ())
    slurm = NodeInfo("n2", NodeState.IDLE)
    silent = NodeFacts(slurm, agent=AgentView("n2", Presence.SILENT, report=report))
    about = Subject(Topic.AGENT_SILENT, network=bool(more))
    assert find_suspicion(silent, SEEN, Policy()) == Suspicion(about, f"its agent is silent{more}")
    gone = NodeFacts(slurm, agent=AgentView("n2", Presence.GONE, report=report))
    fault = find_fault(gone, SEEN, Policy())
    assert fault is not None and fault.text == f"neither its agent nor slurmd answers{more}"
