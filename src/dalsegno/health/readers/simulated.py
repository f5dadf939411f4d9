"""The telemetry of a simulated node."""

from __future__ import annotations

from dalsegno.health.telemetry import VARIABLE, BadTelemetry, Telemetry, parse_telemetry
from dalsegno.health.world import World
from dalsegno.system.apart import NoAnswer


def ask_telemetry(world: World) -> Telemetry | None:
    """None on a real node."""
    path = world.env.get(VARIABLE)
    if not path:
        return None
    try:
        return parse_telemetry(world.read(path))
    except BadTelemetry as error:
        raise NoAnswer(f"the node's telemetry is damaged: {error}") from error
