"""Run a drill: wait until the run trains, inject a fault, check that training resumes, and repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dalsegno.drill.impacts import UNDER_WAY_S, FaultImpact, TrainedStep
from dalsegno.drill.schedule import FaultKind, ScheduledFault

LOOK_S = 0.05
PATIENCE_S = 60.0  # if the run does not train again within this time, no more faults are injected


class DrillStage(Protocol):
    """A run that trains on a cluster into which faults may be injected."""

    def look(self) -> None:
        """Read what is new. Called continuously."""
        ...

    def members(self) -> Sequence[str]:
        """Return the nodes that train now; none while the run recovers."""
        ...

    def lacks_spare(self) -> bool:
        """Return whether a node that is lost now would have no spare ready to replace it."""
        ...

    def newest(self) -> TrainedStep | None:
        """Return the last completed step."""
        ...

    def over(self) -> bool: ...

    def inject(self, kind: FaultKind, node: str) -> None: ...


def play(
    stage: DrillStage,
    faults: Sequence[ScheduledFault],
    notify: Callable[[FaultImpact | str], None],
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    with_spares: bool = False,
) -> list[FaultImpact]:
    """Inject the drawn faults, with `with_spares` only while a spare is ready, and return those that were injected.

    There are fewer if the run ends or does not recover.
    """
    impacts: list[FaultImpact] = []
    for number, fault in enumerate(faults, 1):
        last = impacts[-1] if impacts else None
        members = _wait_until_ready(stage, fault, last, now, sleep, with_spares)
        if not members:
            break
        kind, open_nodes = fault.kind, _choose_nodes(fault.kind, members, impacts)
        if not open_nodes:
            notify(f"{kind.label} is skipped: no training node has an agent any more")
            continue
        node = open_nodes[fault.node % len(open_nodes)]
        bare = kind.stops and kind.heals and stage.lacks_spare()
        impact = FaultImpact(number, kind.label, node, now(), kind.stops, kind.heals, bare)
        impacts.append(impact)
        notify(impact)
        stage.inject(kind, node)
    return impacts


def _wait_until_ready(
    stage: DrillStage,
    fault: ScheduledFault,
    last: FaultImpact | None,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    with_spares: bool,
) -> Sequence[str]:
    """Return the training nodes once enough steps were completed since the last fault; none if that will not happen."""
    until = now() + PATIENCE_S
    begun: TrainedStep | None = None
    while not stage.over():
        stage.look()
        step, members = stage.newest(), stage.members()
        if step is not None and members and (last is None or _is_after(step, last)):
            begun = begun if begun is not None and begun.generation == step.generation else step
            if step.step - begun.step >= fault.after_steps and not (with_spares and stage.lacks_spare()):
                return members
            until = max(until, step.at + PATIENCE_S)
        if now() > until:
            return []
        sleep(LOOK_S)
    return []


def _choose_nodes(kind: FaultKind, members: Sequence[str], impacts: Sequence[FaultImpact]) -> Sequence[str]:
    """Return the nodes where the fault can be seen: nothing restarts an agent that the drill has killed."""
    blind = {impact.node for impact in impacts if impact.fault == "agent-dead"} if kind.by_agent else ()
    return [node for node in members if node not in blind]


def _is_after(step: TrainedStep, last: FaultImpact) -> bool:
    """Return whether a step came after the last fault: one in progress at that time may be recorded a moment later."""
    return step.at > last.at + UNDER_WAY_S
