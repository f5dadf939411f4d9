"""Read all counters of fabric ports, for metrics: from sysfs, or from the telemetry of a simulated node."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dalsegno.health.facts import Port
from dalsegno.health.node_reader import NodeReader
from dalsegno.health.readers.gpus import ask_telemetry
from dalsegno.health.readers.host import CLASS, DOWNED, ERRORS, port_kind, port_places
from dalsegno.system.hanging_calls import NoAnswer

FOLDERS = ("counters", "hw_counters")
MAX_PORTS, MAX_COUNTERS = 128, 256
_COUNTER = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,99}")
_MOST = 1 << 64


@dataclass(frozen=True)
class PortCounters:
    """The counters of a port by sysfs's name. `up` is None if the port does not report its state."""

    device: str  # for example mlx5_0 or rdmap16s27
    port: str  # number of the port
    kind: str  # type of the network: ib, efa or roce
    up: bool | None
    counters: Mapping[str, int]


def ask_port_counters(node: NodeReader) -> tuple[PortCounters, ...]:
    """Return the counters of all ports, up to a limit."""
    telemetry = ask_telemetry(node)
    if telemetry is not None:
        return tuple(_simulated(port) for port in telemetry.ports[:MAX_PORTS])
    return tuple(_read_port(node, device, port) for device, port in port_places(node)[:MAX_PORTS])


def _simulated(port: Port) -> PortCounters:
    device, _, number = port.name.rpartition("/")
    counters = {**dict.fromkeys(ERRORS, 0), **port.errors, DOWNED: len(port.flaps)}
    return PortCounters(device, number, port.kind, port.state == "ACTIVE", counters)


def _read_port(node: NodeReader, device: str, port: str) -> PortCounters:
    folder = f"{CLASS}/{device}/ports/{port}"
    places = [(f"{folder}/{each}", name) for each in FOLDERS for name in node.names(f"{folder}/{each}")]
    named = [(f"{place}/{name}", name) for place, name in places if _COUNTER.fullmatch(name)][:MAX_COUNTERS]
    found = ((name, _read_counter(node, path)) for path, name in named)
    counters = {name: count for name, count in found if count is not None}
    return PortCounters(device, port, port_kind(node, folder), _is_up(node, folder), counters)


def _is_up(node: NodeReader, folder: str) -> bool | None:
    try:
        found = re.fullmatch(r"\d+: (\w+)", node.read(f"{folder}/state").strip())
    except NoAnswer:
        return None
    return found[1] == "ACTIVE" if found else None


def _read_counter(node: NodeReader, path: str) -> int | None:
    """Return a counter; None if its file cannot be read, because the port does not support it, or holds no number."""
    try:
        text = node.read(path).strip()
    except NoAnswer:
        return None
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < _MOST else None
