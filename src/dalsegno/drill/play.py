"""Playing a drill: wait until the run trains, strike, see that it goes on, and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dalsegno.drill.schedule import FaultKind, Lot
from dalsegno.drill.story import UNDER_WAY_S, Blow, TrainedStep

LOOK_S = 0.05
PATIENCE_S = 60.0  # a run that does not train again within that is not struck any more


class DrillStage(Protocol):
    """A run that trains on a cluster that may be hurt."""

    def look(self) -> None:
        """See what is new: called all the time."""
        ...

    def members(self) -> Sequence[str]:
        """The nodes that train now; none while the run recovers."""
        ...

    def is_bare(self) -> bool:
        """A node that is lost now would have to be waited for: no spare is ready."""
        ...

    def newest(self) -> TrainedStep | None:
        """The last step that was done."""
        ...

    def over(self) -> bool: ...

    def strike(self, kind: FaultKind, node: str) -> None: ...


def play(
    stage: DrillStage,
    lots: Sequence[Lot],
    say: Callable[[Blow | str], None],
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    with_spares: bool = False,
) -> list[Blow]:
    """Strike as the lots say, or, with spares, not before they stand by again; gives what was done, which is less
    than that where the run ends or stays away."""
    blows: list[Blow] = []
    for number, lot in enumerate(lots, 1):
        last = blows[-1] if blows else None
        members = _when_ready(stage, lot, last, now, sleep, with_spares)
        if not members:
            break
        kind, open_to = lot.kind, _open_to(lot.kind, members, blows)
        if not open_to:
            say(f"{kind.label} is left out: no node that trains has an agent any more")
            continue
        node = open_to[lot.node % len(open_to)]
        bare = kind.stops and kind.heals and stage.is_bare()
        blow = Blow(number, kind.label, node, now(), kind.stops, kind.heals, bare)
        blows.append(blow)
        say(blow)
        stage.strike(kind, node)
    return blows


def _when_ready(
    stage: DrillStage,
    lot: Lot,
    last: Blow | None,
    now: Callable[[], float],
    sleep: Callable[[float], None],
    with_spares: bool,
) -> Sequence[str]:
    """The nodes that train, once it has gone on for so many steps since the last blow; none: it will not."""
    until = now() + PATIENCE_S
    begun: TrainedStep | None = None
    while not stage.over():
        stage.look()
        step, members = stage.newest(), stage.members()
        if step is not None and members and (last is None or _goes_on(step, last)):
            begun = begun if begun is not None and begun.generation == step.generation else step
            if step.step - begun.step >= lot.after_steps and not (with_spares and stage.is_bare()):
                return members
            until = max(until, step.at + PATIENCE_S)
        if now() > until:
            return []
        sleep(LOOK_S)
    return []


def _open_to(kind: FaultKind, members: Sequence[str], blows: Sequence[Blow]) -> Sequence[str]:
    """Where it can be seen: nobody starts an agent again that the drill itself has killed."""
    blind = {blow.node for blow in blows if blow.fault == "agent-dead"} if kind.by_agent else ()
    return [node for node in members if node not in blind]


def _goes_on(step: TrainedStep, last: Blow) -> bool:
    """A step under way when the blow fell may still be noted a moment later."""
    return step.at > last.at + UNDER_WAY_S
