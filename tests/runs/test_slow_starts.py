"""Agents that are slow to start. The run waits for them if possible, and reports them once."""

from dalsegno.runs.coordinator.nodes.node_rules import LONG_S, describe_slow, still_starting
from dalsegno.slurm.facts import NodeInfo, NodeState

NOW = 5000.0


def node(name: str, slurmd_started_at: int | None) -> NodeInfo:
    return NodeInfo(name, NodeState.ALLOCATED, slurmd_started_at=slurmd_started_at)


def test_rebooted_node_is_no_longer_starting():
    ages = {"n1": 100.0, "n2": 100.0, "n3": 100.0}
    assert still_starting(ages, [node("n1", 4000), node("n2", 4900), node("n3", 4950)], NOW) == ["n1"]


def test_unknown_nodes_may_still_be_starting():
    assert still_starting({"n1": 100.0, "n2": 30.0}, [node("n1", None)], NOW) == ["n1", "n2"]
    assert still_starting({"n1": 100.0}, [], NOW) == ["n1"]


def test_slow_start_is_reported_once_per_node():
    reported: set[str] = set()
    ages = {"n1": LONG_S - 1, "n2": LONG_S, "n3": LONG_S}
    said = describe_slow(ages, ["n1", "n2", "n3"], reported, "/r/agents.log")
    assert said == "agents are slow to start on n[2-3] (image import or prolog); see /r/agents.log"
    assert describe_slow(ages, ["n1", "n2", "n3"], reported, "/r/agents.log") == ""
    assert describe_slow({"n1": LONG_S}, [], reported, "/r/agents.log") == ""
