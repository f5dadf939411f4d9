"""Machines that are off for certain."""

from __future__ import annotations

from dalsegno.recovery.fakes import FakeCluster, FakeTarget
from dalsegno.recovery.presence import look_at_power


class NobodyKnows:
    """A target that cannot tell."""


def lost(cluster: FakeCluster) -> FakeCluster:
    """n1 is off, n2's cable is out, n3 is off and not set down yet, and n4 is well."""
    cluster.power_off("n1")
    cluster.power_off("n3")
    cluster.nodes["n2"].late = True
    for name in ("n1", "n2"):
        cluster.nodes[name].down = True
    return cluster


def test_nodes_that_are_lost_and_set_down_are_asked_for_and_a_cable_that_is_out_is_told_from_a_host_without_power():
    cluster = lost(FakeCluster.of(4))
    nodes = look_at_power(cluster.facts(), FakeTarget(cluster)).nodes
    assert nodes is not None and [name for name, node in nodes.items() if node.off] == ["n1"]


def test_where_nobody_knows_nothing_is_said():
    cluster = lost(FakeCluster.of(4))
    assert look_at_power(cluster.facts(), NobodyKnows()) == cluster.facts()
    cluster.slurm_answers = False
    assert look_at_power(cluster.facts(), FakeTarget(cluster)) == cluster.facts()
