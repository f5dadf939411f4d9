"""Run a drill: wait until the run trains, inject a fault, check that training resumes, and repeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dalsegno.drill.impacts import IN_PROGRESS_S, FaultImpact, TrainedStep
from dalsegno.drill.schedule import FaultKind, ScheduledFault

POLL_S = 0.05
START_TIMEOUT_S = 300.0  # a run that does not train by then gets no faults; starting is slow if all import torch
RESUME_TIMEOUT_S = 60.0  # a run that does not train again within this time gets no more faults


class DrillStage(Protocol):
    """The interface of a drill to a run that trains on a cluster, and to the cluster's spares."""

    def look(self) -> None:
        """Read new steps and events. The drill calls this again and again."""
        ...

    def members(self) -> Sequence[str]:
        """Return the nodes that train now; empty while the run recovers."""
        ...

    def lacks_spare(self) -> bool:
        """Return whether the run requested spares, but none is ready to replace a node that is lost now."""
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
    slowness: float = 1.0,
) -> list[FaultImpact]:
    """Inject these faults one after the other, until the run ends or does not recover. Return the injected ones.

    If `with_spares` is true, each fault waits until a spare is ready. `slowness` scales the time limits.
    """
    impacts: list[FaultImpact] = []
    for number, fault in enumerate(faults, 1):
        last = impacts[-1] if impacts else None
        members = _wait_until_ready(stage, fault, last, now, sleep, with_spares, slowness)
        if not members:
            break
        kind, candidates = fault.kind, _choose_nodes(fault.kind, members, impacts)
        if not candidates:
            notify(f"{kind.label} is skipped: no training node has an agent any more")
            continue
        node = candidates[fault.node % len(candidates)]
        without_spare = kind.stops and kind.needs_repair and stage.lacks_spare()
        impact = FaultImpact(number, kind.label, node, now(), kind.stops, kind.needs_repair, without_spare)
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
    slowness: float,
) -> Sequence[str]:
    """Wait until enough steps follow the last fault, and return the nodes in training. Return none if that takes too
    long, or if the run ends."""
    resume_s = RESUME_TIMEOUT_S * slowness
    until = now() + (resume_s if last else START_TIMEOUT_S * slowness)
    begun: TrainedStep | None = None
    while not stage.over():
        stage.look()
        step, members = stage.newest(), stage.members()
        if step is not None and members and (last is None or _is_after(step, last)):
            begun = begun if begun is not None and begun.generation == step.generation else step
            if step.step - begun.step >= fault.after_steps and not (with_spares and stage.lacks_spare()):
                return members
            until = max(until, step.at + resume_s)
        if now() > until:
            return []
        sleep(POLL_S)
    return []


def _choose_nodes(kind: FaultKind, members: Sequence[str], impacts: Sequence[FaultImpact]) -> Sequence[str]:
    """Return the nodes where the fault can be detected. If `kind.by_agent` is set, leave out nodes whose agent this
    drill has killed."""
    without_agent = {impact.node for impact in impacts if impact.fault == "agent-dead"} if kind.by_agent else ()
    return [node for node in members if node not in without_agent]


def _is_after(step: TrainedStep, last: FaultImpact) -> bool:
    """Return whether a step began after the last fault, and was not only recorded after it."""
    return step.at > last.at + IN_PROGRESS_S
