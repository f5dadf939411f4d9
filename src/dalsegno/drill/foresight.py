"""What of a drill the cluster's controller will leave undone, known before it begins. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dalsegno.drill.lots import Lot
from dalsegno.targets.base import Wound

_STAYS = "nodes that are broken stay so until `dalsegno inject --clear` or `dalsegno up`"
_MODES = {"observe": "the controller only observes (`mode: observe` in the cluster file)",
          "off": "the controller does nothing (`mode: off` in the cluster file)"}  # fmt: skip


def left_undone(lots: Sequence[Lot], told: Mapping[str, Any] | None, partitions: Sequence[str]) -> str:
    """A sentence; "" where all can be mended. `told` is what the controller says of its automation; None: there is
    none."""
    if not any(lot.kind.heals for lot in lots):
        return ""
    if told is None:
        return f"no controller looks after this cluster: {_STAYS}"
    if told.get("automation") == "paused":
        return f"automation is paused: {_STAYS}; `dalsegno automation resume` goes on"
    if mode := _MODES.get(str(told.get("mode"))):
        return f"{mode}: {_STAYS}"
    return _beyond_the_budget(sum(lot.kind.heals for lot in lots), told, partitions)


def mends(told: Mapping[str, Any] | None) -> bool:
    """Whether broken nodes are waited for at all."""
    return told is not None and told.get("automation") != "paused" and told.get("mode") not in _MODES


def _beyond_the_budget(faults: int, told: Mapping[str, Any], partitions: Sequence[str]) -> str:
    """A node that is hit while it is out counts once: so many at the most."""
    taken = max((int(told.get("taken", {}).get(name, 0)) for name in partitions), default=0)
    left = max(int(told.get("per_hour", faults + taken)) - taken, 0)
    if faults <= left:
        return ""
    return (
        f"{faults} of the faults may cost a node, and the controller takes {left} more out of service within this hour:"
        " nodes beyond that stay as they are; `per_hour` in the cluster file allows more"
    )


def already_hurt(wounds: Sequence[Wound], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong before the drill begins, a sentence each. `nodes` is what the controller says of them."""
    injected: dict[str, list[str]] = {}
    for wound in wounds:
        injected.setdefault(wound.node, []).append(wound.fault)
    found = [
        f"{node} has been injected with {' and '.join(faults)} before: the drill leaves that as it is"
        for node, faults in injected.items()
    ]
    return found + [
        f"{node['node']} is suspected: {node['note']}" for node in nodes if node.get("phase") == "suspected"
    ]
