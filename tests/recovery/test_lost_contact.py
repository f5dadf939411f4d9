"""Tests of losing contact with all nodes at once, which counts as a fault of the controller's own network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.health import Remedy
from dalsegno.recovery.agents.view import AgentView
from dalsegno.recovery.decisions.actions import SetDown
from dalsegno.recovery.decisions.decide import SETTLE_S, decide, is_blind, is_doubtful
from dalsegno.recovery.decisions.facts import Facts, NodeFacts
from dalsegno.recovery.decisions.records import NodeRecord, NodeRecords
from dalsegno.slurm.facts import NodeInfo, NodeState
from dalsegno.wire.liveness import Presence
from tests.recovery.clinic import MakeClinic


def test_losing_contact_with_all_nodes_causes_no_action(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.start(7, "n1", "n2", comment="dalsegno:main")
    clinic.cluster.blind = True
    clinic.rounds(500)
    assert [clinic.effects(node) for node in clinic.cluster.nodes] == [[]] * 4
    assert len(clinic.texts()) == 1 and "most likely the controller's own network" in clinic.texts()[0]
    clinic.cluster.blind = False
    clinic.settle()
    assert clinic.texts()[1:] == ["nodes are heard again; recovery continues"]
    clinic.cluster.end(7)
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume", "recovery works as before"


def test_nodes_heard_late_after_regained_contact_are_not_lost(clinic_of: MakeClinic):
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
    assert clinic.effects("n4")[:1] == ["down"], "a later loss counts"


def test_timeouts_of_repairs_start_again_after_regained_contact(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.break_gpu("n2", Remedy.REBOOT)
    clinic.rounds(3)
    assert clinic.effects("n2")[-1] == "reboot"
    clinic.cluster.blind = True
    clinic.rounds(200)
    clinic.cluster.blind, clinic.cluster.nodes["n2"].machine.on = False, False  # the other nodes answer first
    clinic.rounds(3)
    clinic.cluster.nodes["n2"].machine.on = True
    clinic.settle()
    assert clinic.effects("n2") == ["drain", "evidence", "reboot", "validate", "resume"]


def test_a_restart_without_contact_causes_no_action(clinic_of: MakeClinic):
    clinic = clinic_of()
    clinic.cluster.blind = True
    clinic.rounds(3)
    clinic.store.close()
    clinic.open()
    clinic.rounds(50)
    assert len(clinic.texts()) == 1 and clinic.cluster.nodes["n1"].effects == []


def test_nodes_that_slurm_sets_down_too_are_lost(clinic_of: MakeClinic):
    clinic = clinic_of(max_out=1.0)
    for node in clinic.cluster.nodes:
        clinic.cluster.power_off(node)
    clinic.rounds(200)
    assert [clinic.effects(node) for node in clinic.cluster.nodes] == [[]] * 4
    clinic.wait(300)
    clinic.settle()
    assert all(clinic.effects(node)[-1] == "resume" for node in clinic.cluster.nodes)
    assert "Slurm has set the silent nodes down too: they are lost; recovery continues" in clinic.texts()


def test_one_answering_host_proves_contact(clinic_of: MakeClinic):
    clinic = clinic_of(3)
    clinic.cluster.nodes["n1"].agent = False  # the agent is dead, but the host answers
    clinic.cluster.power_off("n2")
    clinic.settle()
    assert clinic.effects("n2")[-1] == "resume"


def test_nodes_that_are_late_with_the_first_lost_one_do_not_prove_contact(clinic_of: MakeClinic):
    """Losses are detected one after the other. The first one must not be taken for the only one."""
    clinic = clinic_of()
    clinic.cluster.power_off("n1")
    for quiet_s, blind in ((0.4, False), (1.0, True)):
        facts = clinic.cluster.facts()
        assert facts.nodes is not None
        late = {name: replace(node, agent=replace(node.agent, quiet_s=quiet_s)) for name, node in facts.nodes.items()}
        assert is_blind(replace(facts, nodes=late), clinic.store.records) is blind


@pytest.mark.parametrize("heard_s, missed", [(-0.1, False), (0.1, True)])
@pytest.mark.parametrize("by", ["last_seen", "answered"])
def test_a_node_is_lost_only_if_another_was_heard_later(clinic_of: MakeClinic, by: str, heard_s: float, missed: bool):
    """The age of the node's own last message does not matter. On a busy machine, that node may be the only late one."""
    clinic = clinic_of()
    clinic.cluster.power_off("n1")
    facts = clinic.cluster.facts()
    assert facts.nodes is not None
    lost = replace(facts.nodes["n1"], agent=replace(facts.nodes["n1"].agent, last_seen=clinic.cluster.now - 30))
    last = {"last_seen": 1.0, "answered": 1.0, by: lost.agent.since + heard_s}
    nodes = {name: replace(node, agent=replace(node.agent, **last)) for name, node in facts.nodes.items()}
    changed = replace(facts, nodes={**nodes, "n1": lost})
    actions = decide(changed, clinic.store.records, clinic.policy, clinic.cluster.now)
    assert [type(action) for action in actions] == ([SetDown] if missed else [])


def test_silence_that_began_without_contact_is_doubtful():
    """The silence of the node began while contact was lost, and the other nodes answer first."""
    view = AgentView(
        "n2", Presence.GONE, since=101.0, last_seen=90.0, boot="b", host_answers=False, slurmd_answers=False
    )
    gone = NodeFacts(NodeInfo("n2", NodeState.IDLE), agent=view)
    other = NodeFacts(NodeInfo("n1", NodeState.IDLE), agent=AgentView("n1", Presence.CONNECTED, 100.5, 102.0, boot="b"))
    facts = Facts({"n1": other, "n2": gone}, slurm_at=102.0)
    known = {name: NodeRecord(name, seen=True, last_boot="b") for name in ("n1", "n2")}
    records = NodeRecords(known, saw_at=100.0)
    assert is_doubtful(gone, facts, records, 102.0)
    assert not is_doubtful(gone, facts, records, 100.0 + SETTLE_S), "only for a while"
    heard_since = replace(gone, agent=replace(view, last_seen=100.5))
    assert not is_doubtful(heard_since, facts, records, 102.0), "a later loss counts"
