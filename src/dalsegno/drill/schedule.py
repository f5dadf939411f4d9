"""Choose which faults a drill injects, where, and after how many steps. Pure: the same seed gives the same faults."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dalsegno.drill.impacts import DrillMark, DrillMarkKind, FaultImpact
from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.inject.faults import FaultOptions, InjectedFault
from dalsegno.recovery.decisions.phase import NodePhase


@dataclass(frozen=True)
class FaultKind:
    """A fault with its options for `inject`, and its expected effects."""

    fault: str
    options: FaultOptions = field(default_factory=FaultOptions)
    stops: bool = True  # whether training stops
    needs_repair: bool = True  # whether the controller has to repair the node
    weight: int = 1
    by_agent: bool = False  # whether the fault hits the node's agent, or only the agent can detect it

    @property
    def label(self) -> str:
        """The name of the fault with its code, such as `xid 79`."""
        return f"{self.fault} {self.options.code}" if self.options.code is not None else self.fault


KINDS = (
    FaultKind("power-off", weight=3),
    FaultKind("worker-kill", needs_repair=False, weight=3),
    FaultKind("xid", FaultOptions(code=79), weight=2, by_agent=True),
    FaultKind("agent-dead", stops=False, needs_repair=False, by_agent=True),
    FaultKind("slurmd-dead", stops=False),
    FaultKind("net-cut", FaultOptions(for_s=3.0)),
)


@dataclass(frozen=True)
class ScheduledFault:
    """One fault to inject."""

    kind: FaultKind
    after_steps: int  # number of steps to wait after the recovery from the previous fault
    node: int  # index among the nodes in training, modulo their number


def select_kinds(names: Sequence[str]) -> Sequence[FaultKind]:
    """Return the kinds with these names; all kinds if no name is given."""
    known = [kind.fault for kind in KINDS]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known, f"one of {', '.join(known)}")
            raise UsageError(f"unknown fault `{name}`", hint=hint)
    return [kind for kind in KINDS if not names or kind.fault in names]


def draw(count: int, seed: int, kinds: Sequence[FaultKind] = KINDS) -> list[ScheduledFault]:
    """Draw `count` faults in random order. Each kind occurs at least once if `count` allows; the rest is
    drawn by weight."""
    generator = random.Random(seed)
    chosen = generator.sample(list(kinds), min(count, len(kinds)))
    chosen += generator.choices(list(kinds), [kind.weight for kind in kinds], k=count - len(chosen))
    generator.shuffle(chosen)
    return [ScheduledFault(kind, generator.randint(5, 25), generator.randrange(1_000_000)) for kind in chosen]


# Number of nodes that train, and of spares


NODES, SPARES = 4, 1  # defaults, fewer if the cluster does not have that many


def choose_size(in_service: int, nodes: int | None, spares: int | None) -> tuple[int, int]:
    """Return the number of nodes and of spares. Numbers that were not requested follow from the available nodes.

    Raise UsageError if more are requested than are in service, because the run would wait in Slurm's queue forever.
    """
    if nodes is None:
        nodes = max(1, min(NODES, in_service - (spares or 0)))
    if spares is None:
        spares = min(SPARES, max(0, in_service - nodes))
    if nodes + spares > in_service:
        by = f" and {spares} spares" if spares else ""
        raise UsageError(
            f"{nodes} nodes{by} requested, but {in_service} nodes of the default partition are in service",
            hint="request fewer with `--nodes N --spares M`; `dalsegno nodes` shows why others are out of service",
        )
    return nodes, spares


# Warnings before the drill starts


_STAYS = "broken nodes stay broken until `dalsegno inject --clear` or `dalsegno up`"
_MODES = {"observe": "the controller only observes (`mode: observe` in the cluster file)",
          "off": "the controller does nothing (`mode: off` in the cluster file)"}  # fmt: skip


def warn_of_missing_repairs(
    faults: Sequence[ScheduledFault], automation: Mapping[str, Any] | None, partitions: Sequence[str]
) -> str:
    """Return a warning if the controller will not repair all nodes; "" if it will.

    `automation` is the controller's answer; None if there is no controller.
    """
    if not any(fault.kind.needs_repair for fault in faults):
        return ""
    if automation is None:
        return f"this cluster has no controller: {_STAYS}"
    if automation.get("automation") == "paused":
        return f"automation is paused: {_STAYS}; resume it with `dalsegno automation resume`"
    if mode := _MODES.get(str(automation.get("mode"))):
        return f"{mode}: {_STAYS}"
    return _warn_of_budget(sum(fault.kind.needs_repair for fault in faults), automation, partitions)


def repairs_nodes(automation: Mapping[str, Any] | None) -> bool:
    """Return whether the controller repairs nodes at present. If it does not answer, assume that it does."""
    return automation is not None and automation.get("automation") != "paused" and automation.get("mode") not in _MODES


def _warn_of_budget(faults: int, automation: Mapping[str, Any], partitions: Sequence[str]) -> str:
    """Return a warning if the faults may exceed the hourly limit of nodes taken out of service. Every fault counts as
    one more node, although two faults can hit the same node."""
    taken = max((int(automation.get("taken", {}).get(name, 0)) for name in partitions), default=0)
    left = max(int(automation.get("per_hour", faults + taken)) - taken, 0)
    if faults <= left:
        return ""
    return (
        f"{faults} faults may take a node out of service, but the controller takes out only {left} more this hour:"
        " further nodes are not repaired; raise `per_hour` in the cluster file to allow more"
    )


def find_existing_faults(faults: Sequence[InjectedFault], nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence about each node that already has an injected fault or is suspected when the drill starts.
    `nodes` is the controller's answer."""
    injected: dict[str, list[str]] = {}
    for fault in faults:
        injected.setdefault(fault.node, []).append(fault.fault)
    found = [
        f"{node} was injected with {' and '.join(names)} before: the drill does not clear that"
        for node, names in injected.items()
    ]
    suspected = [node for node in nodes if NodePhase.parse(node.get("phase")) is NodePhase.SUSPECTED]
    return found + [f"{node['node']} is suspected: {node['note']}" for node in suspected]


# Repairs that are not finished when the run ends


NOTICED_S = 20.0  # if the controller has not noticed a fault after this time, the drill does not wait for its repair


def find_unreturned(impacts: Sequence[FaultImpact], marks: Sequence[DrillMark]) -> list[FaultImpact]:
    """Return the faults whose node should be repaired and has not returned since."""
    returned = {
        mark.node: mark.at for mark in sorted(marks, key=lambda mark: mark.at) if mark.kind is DrillMarkKind.RETURNED
    }
    return [impact for impact in impacts if impact.needs_repair and returned.get(impact.node, 0.0) <= impact.at]


def find_repairable(
    missing: Sequence[FaultImpact], nodes: Mapping[str, Mapping[str, Any]], now: float
) -> list[FaultImpact]:
    """Return the faults whose node may still be repaired. `nodes` is the controller's answer.

    Leave out a node that is still in service after NOTICED_S, because the controller has not noticed its fault, and a
    node that needs an administrator, because the controller no longer repairs it.
    """
    return [
        impact
        for impact in missing
        if _may_be_repaired(impact, NodePhase.parse(nodes.get(impact.node, {}).get("phase")), now)
    ]


def _may_be_repaired(impact: FaultImpact, phase: NodePhase, now: float) -> bool:
    if phase is NodePhase.IN_SERVICE:
        return now - impact.at < NOTICED_S
    return phase is not NodePhase.NEEDS_ADMIN


def describe_waiting(missing: Sequence[FaultImpact], nodes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a status line such as `the run is over; waiting for n1 (xid 79), which is validating`."""
    faults: dict[str, list[str]] = {}
    for impact in missing:
        faults.setdefault(impact.node, []).append(impact.fault)
    each = [f"{node} ({' and '.join(hit)}), which is {_phase(nodes.get(node))}" for node, hit in faults.items()]
    return f"the run is over; waiting for {'; '.join(each)}"


def _phase(node: Mapping[str, Any] | None) -> str:
    return str(node["phase"]) if node and node.get("phase") else "out of service"
