"""Our own metrics of the nodes, and the categories of nodes, which all dialects count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from dalsegno.observe.exposition import Family, labelled
from dalsegno.slurm.parse.load import NodeLoad


class NodeCategory(Enum):
    """The categories that metrics sort nodes into, named as in vpenso's exporter. A node has exactly one category."""

    ALLOC = "alloc"
    COMP = "comp"
    DOWN = "down"
    DRAIN = "drain"
    ERR = "err"
    FAIL = "fail"
    IDLE = "idle"
    MAINT = "maint"
    MIX = "mix"
    PLANNED = "planned"
    RESV = "resv"
    OTHER = "other"

    __hash__ = object.__hash__  # Enum's own hash is ten times slower, which matters with many nodes


# Maps sinfo's state names to categories. For a compound such as `mixed+drain`, the first match in this order counts.
_WORDS = {
    "drained": NodeCategory.DRAIN,
    "draining": NodeCategory.DRAIN,
    "drain": NodeCategory.DRAIN,
    "failing": NodeCategory.FAIL,
    "fail": NodeCategory.FAIL,
    "error": NodeCategory.ERR,
    "down": NodeCategory.DOWN,
    "maint": NodeCategory.MAINT,
    "maintenance": NodeCategory.MAINT,
    "completing": NodeCategory.COMP,
    "reserved": NodeCategory.RESV,
    "planned": NodeCategory.PLANNED,
    "allocated": NodeCategory.ALLOC,
    "mixed": NodeCategory.MIX,
    "idle": NodeCategory.IDLE,
}


@lru_cache(1024)
def node_category(word: str) -> NodeCategory:
    """Return the category of a state name from sinfo; OTHER if the name is unknown."""
    parts = {part.rstrip("*~#!%$@^-") for part in word.split("+")}
    return next((category for known, category in _WORDS.items() if known in parts), NodeCategory.OTHER)


@lru_cache(1024)
def state_label(word: str) -> str:
    """Return the label for a state name from sinfo."""
    return node_category(word).value


def each_node(rows: Iterable[NodeLoad]) -> list[NodeLoad]:
    """Return one row per node. sinfo repeats a node for each of its partitions."""
    return list({row.name: row for row in rows}.values())


class GpuCounts(NamedTuple):
    """The number of GPUs by use, as Slurm reports it. Unavailable GPUs are free GPUs on nodes that accept no jobs."""

    alloc: int
    idle: int
    unavailable: int


def count_gpus(rows: Iterable[NodeLoad]) -> GpuCounts:
    """Return the number of GPUs of these nodes, by use."""
    alloc = idle = unavailable = 0
    for row in rows:
        used = min(row.gpus_used, row.gpus)
        alloc += used
        if row.in_service:
            idle += row.gpus - used
        else:
            unavailable += row.gpus - used
    return GpuCounts(alloc, idle, unavailable)


def by_partition(rows: Iterable[NodeLoad]) -> dict[str, list[NodeLoad]]:
    """Return the nodes of each partition, in the order of sinfo."""
    found: dict[str, list[NodeLoad]] = {}
    for row in rows:
        if row.partition:
            found.setdefault(row.partition, []).append(row)
    return found


def node_families(rows: Sequence[NodeLoad]) -> list[Family]:
    """Return our own metrics of the nodes."""
    nodes: dict[tuple[str, ...], float] = {}
    gpus: dict[tuple[str, ...], float] = {}
    for partition, members in by_partition(rows).items():
        counts = Counter(node_category(row.word) for row in members)
        nodes.update({(partition, category.value): counts[category] for category in NodeCategory})
        gpus.update({(partition, use): count for use, count in count_gpus(members)._asdict().items()})
    states: dict[tuple[str, ...], float] = {(row.name, state_label(row.word)): 1 for row in each_node(rows)}
    in_each = "A node in several partitions counts in each of them."
    return [
        labelled("dalsegno_nodes", f"Nodes by state. {in_each}", ["partition", "state"], nodes),
        labelled("dalsegno_gpus", f"GPUs by use. {in_each}", ["partition", "state"], gpus),
        labelled("dalsegno_node_state", "The state of each node; always 1.", ["node", "state"], states),
    ]
