"""What of a drill is still to come when its run is over. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dalsegno.drill.story import RETURNED, Blow, Mark

NOTICED_S = 20.0  # whatever nobody has seen by then, nobody will
_IN_SERVICE, _GIVEN_UP = "in service", "given up"


def still_out(blows: Sequence[Blow], marks: Sequence[Mark]) -> list[Blow]:
    """Blows whose node was to be mended, and has not been returned since."""
    returned = {mark.node: mark.at for mark in sorted(marks, key=lambda mark: mark.at) if mark.what == RETURNED}
    return [blow for blow in blows if blow.heals and returned.get(blow.node, 0.0) <= blow.at]


def worth_waiting(missing: Sequence[Blow], nodes: Mapping[str, Mapping[str, Any]], now: float) -> list[Blow]:
    """Those of them that may yet come. `nodes` is what the controller says of each: of one that it has in service
    still it has seen nothing, and one that it has given up needs a person."""
    return [blow for blow in missing if _may_come(blow, nodes.get(blow.node, {}).get("phase"), now)]


def _may_come(blow: Blow, phase: object, now: float) -> bool:
    if phase == _IN_SERVICE:
        return now - blow.at < NOTICED_S
    return phase != _GIVEN_UP


def waited_for(missing: Sequence[Blow], nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """`the run is over; waits for n1 (xid 79), which is validating`"""
    faults: dict[str, list[str]] = {}
    for blow in missing:
        faults.setdefault(blow.node, []).append(blow.fault)
    each = [f"{node} ({' and '.join(hit)}), which is {_phase(nodes.get(node))}" for node, hit in faults.items()]
    return f"the run is over; waits for {'; '.join(each)}"


def _phase(node: Mapping[str, Any] | None) -> str:
    return str(node["phase"]) if node and node.get("phase") else "out of service"
