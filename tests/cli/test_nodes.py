"""Tests of `nodes`: the controller's view combined with drains by others."""

from __future__ import annotations

from dalsegno.cli.health.nodes import find_other_drains, with_other_drains
from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState


def node(name: str, reason: str = "", user: str = "bob") -> NodeInfo:
    return NodeInfo(name, NodeState.IDLE, frozenset({NodeFlag.DRAIN}), reason=reason, reason_user=user)


def node_view(name: str, phase: str, note: str = "") -> dict[str, str]:
    return {"node": name, "phase": phase, "reason": "", "note": note}


def test_node_drained_by_someone_else_is_not_shown_as_in_service():
    others = find_other_drains([
        node("gpu-1", "new RAM"),
        node("gpu-2", "dalsegno:drain:disk full"),
        node("gpu-3", "Prolog error", "ada"),
        NodeInfo("gpu-4", NodeState.IDLE),
    ], {"ada"})  # fmt: skip
    assert others == {"gpu-1": "drained by bob: new RAM"}
    shown = with_other_drains(node_view("gpu-1", "in service", "xid GPU 0 is off the bus"), others)
    assert (shown["phase"], shown["reason"]) == ("left alone", "drained by bob: new RAM; xid GPU 0 is off the bus")
    assert with_other_drains(node_view("gpu-4", "in service"), others)["phase"] == "in service"


def test_our_own_phase_takes_precedence_over_other_drains():
    assert (
        with_other_drains(node_view("gpu-1", "repairing"), {"gpu-1": "drained by bob: new RAM"})["phase"] == "repairing"
    )
