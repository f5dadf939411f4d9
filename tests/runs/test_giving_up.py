"""Nodes on which no agent could be started: given up, and trusted again."""

from dataclasses import replace

from dalsegno.runs.coordinator.node_loss import (
    FORGIVEN_S,
    LATELY_S,
    MOST_TRIES,
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


def test_a_node_is_tried_so_often_and_no_more():
    tries = Tries()
    assert [tries.count_try("n1") for _ in range(MOST_TRIES + 1)] == [True] * MOST_TRIES + [False]
    assert tries.count_try("n2")


def test_what_it_did_before_it_came_back_does_not_count():
    tries = Tries()
    for _ in range(MOST_TRIES):
        tries.count_try("n1")
    tries.forget("n1")
    assert tries.count_try("n1")


def test_all_are_started_together_but_who_failed_twice_is_started_alone():
    tries = Tries()
    for name in ("n1", "n2", "n3", "n2", "n3", "n3", "n2"):
        tries.count_try(name)
    assert tries.group_by_srun(["n1", "n2", "n3"]) == [("n1",), ("n2",), ("n3",)]
    assert tries.group_by_srun(["n1", "n4"]) == [("n1", "n4")]


def test_a_node_whose_slurmd_was_started_since_is_trusted_again():
    given_up = {"n1": 1000.7, "n2": 1000.7, "n3": 1000.7}
    nodes = [node("n1", started=1000), node("n2", started=999)]
    assert usable_again(given_up, nodes, now=1010.0) == ["n1"]


def test_one_of_long_ago_is_tried_again_if_slurm_has_it_in_service():
    given_up, late = {"n1": 1000.0, "n2": 1000.0}, 1001.0 + FORGIVEN_S
    nodes = [node("n1", 10), node("n2", 10, NodeFlag.NOT_RESPONDING)]
    assert usable_again(given_up, nodes, late) == ["n1"]


def test_one_that_was_out_of_service_is_trusted_when_it_is_returned_or_a_spare_again():
    given_up = {"n1": 1000.0, "n2": 1000.0, "n3": 1000.0, "n4": 1000.0}
    sick = replace(node("n2", 10, NodeFlag.DRAIN), reason="dalsegno:reset:gpu-ecc")
    spare = replace(node("n3", 10, NodeFlag.DRAIN), reason=SPARE_REASON)
    nodes = [node("n1", 10), sick, spare, node("n4", 10)]
    assert usable_again(given_up, nodes, now=1010.0, were_out={"n1", "n2", "n3"}) == ["n1", "n3"]


def test_drained_and_set_down_is_out_of_service_and_a_spare_is_not():
    """One whose cable was out is set down, and returned without a boot."""
    down = replace(node("n1", 10), state=NodeState.DOWN, reason="dalsegno:replace:gone neither answers")
    drained = replace(node("n2", 10, NodeFlag.DRAIN), reason="new RAM")
    spare = replace(node("n3", 10, NodeFlag.DRAIN), reason=SPARE_REASON)
    assert out_of_service([down, drained, spare, node("n4", 10)]) == {"n1", "n2"}


def test_slurm_is_asked_often_only_for_a_minute_after_a_node_was_given_up():
    assert ask_again_s([], 1000.0) == ASK_SLURM_S
    assert ask_again_s([900.0, 990.0], 1000.0) == SOON_S
    assert ask_again_s([900.0, 990.0], 1000.0 + LATELY_S) == ASK_SLURM_S
