"""Nodes on a line that loses packets: suspected for as long as it lasts, and the events say what it is."""

from __future__ import annotations

import pytest

from dalsegno.health import Finding, Report, Result, passed, warned
from dalsegno.recovery.agent_view import AgentView, Presence
from dalsegno.recovery.book import NodeBook
from dalsegno.recovery.facts import NodeFacts
from dalsegno.recovery.judge import STEADY_S, find_fault, find_suspicion
from dalsegno.recovery.phase import Phase
from dalsegno.recovery.policy import Policy
from dalsegno.slurm import NodeInfo, NodeState
from tests.recovery.clinic import STEP_S, MakeClinic

SEEN = NodeBook("n2", seen=True, last_boot="boot-1")


def test_an_agent_that_falls_silent_again_and_again_is_told_of_once(clinic_of: MakeClinic):
    clinic = clinic_of()
    node = clinic.cluster.nodes["n2"]
    for _ in range(10):
        node.quiet = True
        clinic.rounds(2)
        node.quiet = False
        clinic.rounds(3)
    assert clinic.told("n2") == ["suspected: its agent is silent"]
    clinic.rounds(int(STEADY_S / STEP_S))
    assert clinic.phase("n2") is Phase.IN_SERVICE
    assert clinic.told("n2")[1:] == ["in service: nothing is wrong with it any more"]


@pytest.mark.parametrize(
    ("said", "more"),
    [(warned("16 of 47 sent again"), "; before that, 16 of 47 sent again"), (passed("what is sent arrives"), "")],
)
def test_of_a_node_that_falls_silent_it_is_told_what_its_network_did_before(said: Result, more: str):
    report = Report("n2", "boot-1", (Finding("network", said, 1.0),), ())
    slurm = NodeInfo("n2", NodeState.IDLE)
    silent = NodeFacts(slurm, agent=AgentView("n2", Presence.SILENT, report=report))
    assert find_suspicion(silent, SEEN, Policy()) == f"its agent is silent{more}"
    gone = NodeFacts(slurm, agent=AgentView("n2", Presence.GONE, report=report))
    fault = find_fault(gone, SEEN, Policy())
    assert fault is not None and fault.text == f"neither its agent nor slurmd answers{more}"
