"""Tests of machines that are certainly off."""

from __future__ import annotations

from dalsegno.recovery.fakes import FakeCluster, FakeTarget
from dalsegno.recovery.watch import mark_powered_off


class NobodyKnows:
    """A target that does not know the power state."""


def lost(cluster: FakeCluster) -> FakeCluster:
    """Power n1 off, pull n2's cable, power n3 off without setting it down, and leave n4 healthy."""
    cluster.power_off("n1")
    cluster.power_off("n3")
    cluster.nodes["n2"].late = True
    for name in ("n1", "n2"):
        cluster.nodes[name].down = True
    return cluster


def test_only_a_down_node_without_power_is_certainly_off():
    cluster = lost(FakeCluster.of(4))
    nodes = mark_powered_off(cluster.facts(), FakeTarget(cluster)).nodes
    assert nodes is not None and [name for name, node in nodes.items() if node.off] == ["n1"]


def test_without_knowledge_of_power_nothing_changes():
    cluster = lost(FakeCluster.of(4))
    assert mark_powered_off(cluster.facts(), NobodyKnows()) == cluster.facts()
    cluster.slurm_answers = False
    assert mark_powered_off(cluster.facts(), FakeTarget(cluster)) == cluster.facts()
