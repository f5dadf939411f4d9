"""Asking what a busy machine may answer late."""

from __future__ import annotations

from dalsegno.health.world import World
from dalsegno.system.apart import Late
from dalsegno.system.processes import Completed

PATIENCE_S = 1.25  # for one answer


def ask_twice(world: World, argv: tuple[str, ...], stdin: str | None = None) -> Completed:
    """What is late twice is late: Late. One that cannot even be killed is not waited for again."""
    try:
        return world.run(argv, stdin=stdin, timeout_s=PATIENCE_S)
    except Late:
        return world.run(argv, stdin=stdin, timeout_s=PATIENCE_S)
