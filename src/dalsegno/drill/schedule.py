"""Which faults a drill injects, where and after how many steps. Pure: the same seed, the same drill."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dalsegno.drill.story import RETURNED, Blow, DrillMark
from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.inject.faults import FaultOptions, InjectedFault
from dalsegno.recovery.phase import NodePhase


@dataclass(frozen=True)
class FaultKind:
    """A fault as `inject` knows it, and what is to be expected of it."""

    fault: str
    options: FaultOptions = field(default_factory=FaultOptions)
    stops: bool = True  # training cannot go on where it was
    heals: bool = True  # the controller has something to mend
    weight: int = 1
    by_agent: bool = False  # only the node's agent can see it, or be hit by it

    @property
    def label(self) -> str:
        """`xid 79`"""
        return f"{self.fault} {self.options.code}" if self.options.code is not None else self.fault


KINDS = (
    FaultKind("power-off", weight=3),
    FaultKind("worker-kill", heals=False, weight=3),
    FaultKind("xid", FaultOptions(code=79), weight=2, by_agent=True),
    FaultKind("agent-dead", stops=False, heals=False, by_agent=True),
    FaultKind("slurmd-dead", stops=False),
    FaultKind("net-cut", FaultOptions(for_s=3.0)),
)


@dataclass(frozen=True)
class Lot:
    """One fault to come."""

    kind: FaultKind
    after_steps: int  # since the last one was recovered from
    node: int  # the how manieth of those that train at that time


def chosen(names: Sequence[str]) -> Sequence[FaultKind]:
    """The kinds of these names; all where none is named."""
    known = [kind.fault for kind in KINDS]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, f"one of {', '.join(known)}")
            raise UsageError(f"a drill has no fault `{name}`", hint=hint)
    return [kind for kind in KINDS if not names or kind.fault in names]


def draw(count: int, seed: int, kinds: Sequence[FaultKind] = KINDS) -> list[Lot]:
    """Every kind once, as far as there is room, then by weight; in random order."""
    dice = random.Random(seed)
    chosen = dice.sample(list(kinds), min(count, len(kinds)))
    chosen += dice.choices(list(kinds), [kind.weight for kind in kinds], k=count - len(chosen))
    dice.shuffle(chosen)
    return [Lot(kind, dice.randint(5, 25), dice.randrange(1_000_000)) for kind in chosen]


# ---- How many nodes of a cluster train in a drill, and how many stand by. Pure.


NODES, SPARES = 4, 1  # where nobody says otherwise, and there are so many


def cast(in_service: int, nodes: int | None, spares: int | None) -> tuple[int, int]:
    """As many as were asked for, else as there are; more than there are would wait in Slurm's queue for ever."""
    if nodes is None:
        nodes = max(1, min(NODES, in_service - (spares or 0)))
    if spares is None:
        spares = min(SPARES, max(0, in_service - nodes))
    if nodes + spares > in_service:
        by = f" and {spares} more that stand by" if spares else ""
        raise UsageError(
            f"{nodes} nodes{by} are asked for, and {in_service} of the default partition are in service",
            hint="`--nodes N --spares M` asks for fewer; `dalsegno nodes` shows why others are out",
        )
    return nodes, spares


# ---- What of a drill the cluster's controller will leave undone, known before it begins. Pure.


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


def already_hurt(faults: Sequence[InjectedFault], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong before the drill begins, a sentence each. `nodes` is what the controller says of them."""
    injected: dict[str, list[str]] = {}
    for fault in faults:
        injected.setdefault(fault.node, []).append(fault.fault)
    found = [
        f"{node} has been injected with {' and '.join(names)} before: the drill leaves that as it is"
        for node, names in injected.items()
    ]
    suspected = [node for node in nodes if NodePhase.told(node.get("phase")) is NodePhase.SUSPECTED]
    return found + [f"{node['node']} is suspected: {node['note']}" for node in suspected]


# ---- What of a drill is still to come when its run is over. Pure.


NOTICED_S = 20.0  # whatever nobody has seen by then, nobody will


def still_out(blows: Sequence[Blow], marks: Sequence[DrillMark]) -> list[Blow]:
    """Blows whose node was to be mended, and has not been returned since."""
    returned = {mark.node: mark.at for mark in sorted(marks, key=lambda mark: mark.at) if mark.what == RETURNED}
    return [blow for blow in blows if blow.heals and returned.get(blow.node, 0.0) <= blow.at]


def worth_waiting(missing: Sequence[Blow], nodes: Mapping[str, Mapping[str, Any]], now: float) -> list[Blow]:
    """Those of them that may yet come. `nodes` is what the controller says of each: of one that it has in service
    still it has seen nothing, and one that it has given up needs a person."""
    return [blow for blow in missing if _may_come(blow, NodePhase.told(nodes.get(blow.node, {}).get("phase")), now)]


def _may_come(blow: Blow, phase: NodePhase, now: float) -> bool:
    if phase is NodePhase.IN_SERVICE:
        return now - blow.at < NOTICED_S
    return phase is not NodePhase.GIVEN_UP


def waited_for(missing: Sequence[Blow], nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """`the run is over; waits for n1 (xid 79), which is validating`"""
    faults: dict[str, list[str]] = {}
    for blow in missing:
        faults.setdefault(blow.node, []).append(blow.fault)
    each = [f"{node} ({' and '.join(hit)}), which is {_phase(nodes.get(node))}" for node, hit in faults.items()]
    return f"the run is over; waits for {'; '.join(each)}"


def _phase(node: Mapping[str, Any] | None) -> str:
    return str(node["phase"]) if node and node.get("phase") else "out of service"
