"""The ports of the fabric: InfiniBand, RoCE and EFA, from sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.health.facts import Port
from dalsegno.health.readers.simulated import ask_telemetry
from dalsegno.health.world import World
from dalsegno.system.apart import NoAnswer

CLASS = "/sys/class/infiniband"
ERRORS = (
    "symbol_error", "link_error_recovery", "port_rcv_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)  # fmt: skip
DOWNED = "link_downed"
_KINDS = {"InfiniBand": "ib", "Ethernet": "roce"}
_FLAPS_KEPT = 100


@dataclass(frozen=True)
class Ports:
    """`expected`: how many should be up, as far as it is known."""

    ports: tuple[Port, ...]
    expected: int
    now: float
    booted_at: float


def has_ports(world: World) -> bool:
    told = ask_telemetry(world)
    return bool(told.ports) if told else bool(world.names(CLASS))


def ask_ports(world: World) -> Ports:
    told = ask_telemetry(world)
    if told is not None:
        return Ports(told.ports, len(told.ports), world.now(), told.booted_at)
    ports = tuple(_port(world, device, number) for device, number in _places(world))
    world.seen.active.update(port.name for port in ports if port.state == "ACTIVE")
    booted_at = world.now() - float(world.read("/proc/uptime").split()[0])
    return Ports(ports, len(world.seen.active), world.now(), booted_at)


def _places(world: World) -> list[tuple[str, str]]:
    return [(device, number) for device in world.names(CLASS) for number in world.names(f"{CLASS}/{device}/ports")]


def _port(world: World, device: str, number: str) -> Port:
    folder, name = f"{CLASS}/{device}/ports/{number}", f"{device}/{number}"
    found = re.fullmatch(r"\d+: (\w+)", world.read(f"{folder}/state").strip())
    if not found:
        raise NoAnswer(f"{folder}/state is not understood")
    counters = {name: count for name in (*ERRORS, DOWNED) if (count := _count(world, f"{folder}/counters/{name}"))}
    flaps = _flaps(world, name, counters.pop(DOWNED, 0))
    return Port(name, found[1], _kind(world, folder), flaps, counters)


def _flaps(world: World, port: str, downed: int) -> tuple[float, ...]:
    """The counter has no times: they are when it was seen to rise."""
    seen = world.seen
    rise = downed - seen.downs.get(port, downed)
    seen.downs[port] = downed
    if rise > 0:
        seen.flaps[port] = (*seen.flaps.get(port, ()), *[world.now()] * rise)[-_FLAPS_KEPT:]
    return seen.flaps.get(port, ())


def _kind(world: World, folder: str) -> str:
    try:
        return _KINDS.get(world.read(f"{folder}/link_layer").strip(), "efa")
    except NoAnswer:
        return "efa"


def _count(world: World, path: str) -> int:
    """0 for a counter that this kind of port does not have."""
    try:
        text = world.read(path).strip()
    except NoAnswer:
        return 0
    return int(text) if text.isdigit() else 0
