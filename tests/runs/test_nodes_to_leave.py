"""Tests of which nodes a run leaves for repair, and when."""

from __future__ import annotations

from dalsegno.runs.comment import JobRole, RunComment, left_comment, nodes_left, read_comment
from dalsegno.runs.coordinator.nodes.node_rules import drained_for_repair, nodes_to_leave
from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState


def node(name: str, reason: str = "", *flags: NodeFlag) -> NodeInfo:
    return NodeInfo(name, NodeState.ALLOCATED, frozenset(flags), reason=reason)


def test_only_drains_of_the_controller_mean_repair():
    nodes = [
        node("n1", "dalsegno:reboot:xid[79] GPU 0 has fallen off the bus", NodeFlag.DRAIN),
        node("n2", "new RAM", NodeFlag.DRAIN),
        node("n3", "dalsegno:spare", NodeFlag.DRAIN),
        node("n4", "dalsegno:reboot:xid[79] repaired since"),
        node("n5"),
    ]
    assert drained_for_repair(nodes) == {"n1": "reboot:xid[79] GPU 0 has fallen off the bus"}


def test_run_leaves_only_nodes_it_can_spare():
    vacating = {"n1": "xid", "n2": "xid", "gone": "xid"}
    ready = ["n1", "n2", "n3", "n4", "n5"]
    assert nodes_to_leave(vacating, ready, wanted=5) == []
    assert nodes_to_leave(vacating, ready, wanted=4) == ["n1"]
    assert nodes_to_leave(vacating, ready, wanted=2) == ["n1", "n2"]


def test_comment_with_left_nodes_survives_the_round_trip():
    assert left_comment(JobRole.MAIN, []) == "dalsegno:main"
    assert left_comment(JobRole.MAIN, ["n2", "n1"]) == "dalsegno:main left=n1,n2"
    assert nodes_left("dalsegno:main left=n1,n2") == {"n1", "n2"}
    assert read_comment("dalsegno:join left=n1") == RunComment(JobRole.JOIN, frozenset({"n1"}))
    assert read_comment("dalsegno:whatever") == RunComment(JobRole.UNKNOWN) and read_comment("mine") is None
    assert nodes_left("dalsegno:main") == nodes_left("") == nodes_left("I left=n1") == frozenset()
