"""Agents that take long to start: waited for where nothing speaks against it, and told of once."""

from dalsegno.runs.coordinator.node_loss import LONG_S, describe_slow, still_starting
from dalsegno.slurm.facts import NodeInfo, NodeState

NOW = 5000.0


def node(name: str, slurmd_started_at: int | None) -> NodeInfo:
    return NodeInfo(name, NodeState.ALLOCATED, slurmd_started_at=slurmd_started_at)


def test_one_that_was_booted_again_since_has_nothing_left_of_what_was_begun_there():
    ages = {"n1": 100.0, "n2": 100.0, "n3": 100.0}
    assert still_starting(ages, [node("n1", 4000), node("n2", 4900), node("n3", 4950)], NOW) == ["n1"]


def test_of_nodes_that_slurm_says_nothing_of_nothing_is_known_against_them():
    assert still_starting({"n1": 100.0, "n2": 30.0}, [node("n1", None)], NOW) == ["n1", "n2"]
    assert still_starting({"n1": 100.0}, [], NOW) == ["n1"]


def test_it_is_told_once_of_each_and_not_before_it_is_long():
    told: set[str] = set()
    ages = {"n1": LONG_S - 1, "n2": LONG_S, "n3": LONG_S}
    said = describe_slow(ages, ["n1", "n2", "n3"], told, "/r/agents.log")
    assert said == "agents are slow to start on n[2-3] (image import or prolog); see /r/agents.log"
    assert describe_slow(ages, ["n1", "n2", "n3"], told, "/r/agents.log") == ""
    assert describe_slow({"n1": LONG_S}, [], told, "/r/agents.log") == ""
