"""Which nodes there are and which partition holds which: names only, sizes come later."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.spec.cycles import find_cycle
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.partition import Partition


def own_nodes(partition: Partition) -> list[str]:
    """Nodes a partition brings with it, spares not counted."""
    if partition.nodes_from:
        return []
    return _names(partition, partition.nodes or 0, first=1)


def own_spares(partition: Partition) -> list[str]:
    """Its spares, named after the others."""
    if partition.nodes_from:
        return []
    return _names(partition, partition.spares, first=len(own_nodes(partition)) + 1)


def _names(partition: Partition, wanted: int | Sequence[str], first: int) -> list[str]:
    if not isinstance(wanted, int):
        return list(wanted)
    # Node names are host names: no capitals, no underscore.
    base = partition.name.lower().replace("_", "-")
    return [f"{base}-{number}" for number in range(first, first + wanted)]


def login_nodes(spec: ClusterSpec) -> list[str]:
    """Names of the login nodes."""
    return list(spec.login.names) or [f"login-{number}" for number in range(1, spec.login.count + 1)]


def members(spec: ClusterSpec) -> dict[str, list[str]]:
    """Nodes of every partition by its name, spares last; shared machines are in each that shares them."""
    by_name = {partition.name: partition for partition in spec.partitions}
    spares = {name for partition in spec.partitions for name in own_spares(partition)}
    held: dict[str, list[str]] = {}
    waiting = list(by_name.values())
    while waiting:
        ready = [each for each in waiting if all(name in held or name not in by_name for name in each.nodes_from)]
        # Those in a circle are never ready; the checks report it, and here they share nothing.
        for partition in ready or waiting:
            held[partition.name] = _gather(partition, held, spares)
        waiting = [each for each in waiting if each.name not in held]
    return held


def _gather(partition: Partition, held: dict[str, list[str]], spares: set[str]) -> list[str]:
    if not partition.nodes_from:
        return own_nodes(partition) + own_spares(partition)
    shared = dict.fromkeys(name for source in partition.nodes_from for name in held.get(source, []))
    if not isinstance(partition.nodes, int):
        return list(shared)
    return [*(name for name in shared if name not in spares), *(name for name in shared if name in spares)][
        : partition.nodes
    ]


def find_circle(spec: ClusterSpec) -> list[str]:
    """Partitions that take their nodes from each other in a circle, [] if none do."""
    sources = {partition.name: partition.nodes_from for partition in spec.partitions}
    return find_cycle(sources)
