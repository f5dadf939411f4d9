"""Nodes on which no agent starts: when they are lost, and when they are used again."""

from dataclasses import replace

from dalsegno.runs.coordinator.nodes.node_rules import (
    FORGIVEN_S,
    LATELY_S,
    MAX_TRIES,
    SOON_S,
    Tries,
    ask_again_s,
    out_of_service,
    usable_again,
)
from dalsegno.runs.coordinator.site import ASK_SLURM_S
from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState
from dalsegno.slurm.render import SPARE_REASON


def node(name: str, started: int, *flags: NodeFlag) -> NodeInfo:
    return NodeInfo(name, NodeState.IDLE, frozenset(flags), slurmd_started_at=started)


def test_node_is_tried_a_limited_number_of_times():
    tries = Tries()
    assert [tries.count_try("n1") for _ in range(MAX_TRIES + 1)] == [True] * MAX_TRIES + [False]
    assert tries.count_try("n2")


def test_tries_before_a_recovery_do_not_count():
    tries = Tries()
    for _ in range(MAX_TRIES):
        tries.count_try("n1")
    tries.forget("n1")
    assert tries.count_try("n1")


def test_nodes_share_an_srun_unless_they_failed_twice():
    tries = Tries()
    for name in ("n1", "n2", "n3", "n2", "n3", "n3", "n2"):
        tries.count_try(name)
    assert tries.group_by_srun(["n1", "n2", "n3"]) == [("n1",), ("n2",), ("n3",)]
    assert tries.group_by_srun(["n1", "n4"]) == [("n1", "n4")]


def test_node_is_used_again_after_its_slurmd_restarted():
    given_up = {"n1": 1000.7, "n2": 1000.7, "n3": 1000.7}
    nodes = [node("n1", started=1000), node("n2", started=999)]
    assert usable_again(given_up, nodes, now=1010.0) == ["n1"]


def test_node_lost_long_ago_is_tried_again_if_in_service():
    given_up, late = {"n1": 1000.0, "n2": 1000.0}, 1001.0 + FORGIVEN_S
    nodes = [node("n1", 10), node("n2", 10, NodeFlag.NOT_RESPONDING)]
    assert usable_again(given_up, nodes, late) == ["n1"]


def test_node_is_used_again_when_it_returns_to_service_or_becomes_a_spare():
    given_up = {"n1": 1000.0, "n2": 1000.0, "n3": 1000.0, "n4": 1000.0}
    sick = replace(node("n2", 10, NodeFlag.DRAIN), reason="dalsegno:reset:gpu-ecc")
    spare = replace(node("n3", 10, NodeFlag.DRAIN), reason=SPARE_REASON)
    nodes = [node("n1", 10), sick, spare, node("n4", 10)]
    assert usable_again(given_up, nodes, now=1010.0, were_out={"n1", "n2", "n3"}) == ["n1", "n3"]


def test_drained_and_down_nodes_are_out_of_service_but_spares_are_not():
    """A node with a loose cable is marked down, and returns without a reboot."""
    down = replace(node("n1", 10), state=NodeState.DOWN, reason="dalsegno:replace:gone neither answers")
    drained = replace(node("n2", 10, NodeFlag.DRAIN), reason="new RAM")
    spare = replace(node("n3", 10, NodeFlag.DRAIN), reason=SPARE_REASON)
    assert out_of_service([down, drained, spare, node("n4", 10)]) == {"n1", "n2"}


def test_slurm_is_polled_often_only_for_a_minute_after_a_loss():
    assert ask_again_s([], 1000.0) == ASK_SLURM_S
    assert ask_again_s([900.0, 990.0], 1000.0) == SOON_S
    assert ask_again_s([900.0, 990.0], 1000.0 + LATELY_S) == ASK_SLURM_S


def test_node_on_demand_is_used_again_once_slurm_has_powered_it_down():
    """The next job on the node gets a new machine. A node that is not powered down may still have the old one."""
    given_up = {"n1": 1000.0, "n2": 1000.0, "n3": 1000.0, "n4": 1000.0}
    off, going = node("n1", 10, NodeFlag.POWERED_DOWN), node("n2", 10, NodeFlag.POWERING_DOWN)
    drained = node("n3", 10, NodeFlag.POWERED_DOWN, NodeFlag.DRAIN)
    down = replace(node("n4", 10, NodeFlag.POWERED_DOWN), state=NodeState.DOWN)
    assert usable_again(given_up, [off, going, drained, down], now=1010.0) == ["n1"]
