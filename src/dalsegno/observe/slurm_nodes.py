"""Our own metrics of the nodes, and the category of each node that all dialects count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache

from dalsegno.observe.exposition import Family, labelled
from dalsegno.slurm.facts import NodeFlag, NodeState
from dalsegno.slurm.parse.load import NodeLoad


class NodeCategory(Enum):
    """The states of nodes in metrics, as vpenso's exporter names them. A node has exactly one."""

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


class GpuUse(Enum):
    """What a GPU is doing, as Slurm sees it."""

    ALLOC = "alloc"
    IDLE = "idle"
    UNAVAILABLE = "unavailable"  # free, on a node on which no job starts


# sinfo's words. In a compound such as `mixed+drain`, the first match from the top counts.
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
_CLOSED = {
    NodeFlag.DRAIN,
    NodeFlag.FAIL,
    NodeFlag.INVALID_REG,
    NodeFlag.MAINTENANCE,
    NodeFlag.NOT_RESPONDING,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.REBOOT_ISSUED,
}
_OPEN_STATES = (NodeState.IDLE, NodeState.MIXED, NodeState.ALLOCATED)


@lru_cache(1024)
def node_category(word: str) -> NodeCategory:
    """Return the category of sinfo's word for a state. A word that is not known is OTHER."""
    parts = {part.rstrip("*~#!%$@^-") for part in word.split("+")}
    return next((category for known, category in _WORDS.items() if known in parts), NodeCategory.OTHER)


def each_node(rows: Iterable[NodeLoad]) -> list[NodeLoad]:
    """Return one row per node. sinfo repeats a node for each of its partitions."""
    return list({row.name: row for row in rows}.values())


def partition_names(rows: Iterable[NodeLoad]) -> list[str]:
    """Return the partitions in the order of sinfo."""
    return [name for name in dict.fromkeys(row.partition for row in rows) if name]


def gpu_uses(row: NodeLoad) -> dict[GpuUse, int]:
    """Return the GPUs of a node by use."""
    used = min(row.gpus_used, row.gpus)
    free = GpuUse.IDLE if row.state in _OPEN_STATES and not row.flags & _CLOSED else GpuUse.UNAVAILABLE
    return {GpuUse.ALLOC: used, free: row.gpus - used}


def node_families(rows: Sequence[NodeLoad]) -> list[Family]:
    """Return our own metrics of the nodes."""
    partitions = partition_names(rows)
    nodes: dict[tuple[str, ...], float] = {
        (partition, category.value): 0 for partition in partitions for category in NodeCategory
    }
    gpus: dict[tuple[str, ...], float] = {(partition, use.value): 0 for partition in partitions for use in GpuUse}
    for row in rows:
        if row.partition:
            nodes[row.partition, node_category(row.word).value] += 1
            for use, count in gpu_uses(row).items() if row.gpus else ():
                gpus[row.partition, use.value] += count
    states: dict[tuple[str, ...], float] = {(row.name, node_category(row.word).value): 1 for row in each_node(rows)}
    in_each = "A node in several partitions counts in each of them."
    return [
        labelled("dalsegno_nodes", f"Nodes by state. {in_each}", ["partition", "state"], nodes),
        labelled("dalsegno_gpus", f"GPUs by use. {in_each}", ["partition", "state"], gpus),
        labelled("dalsegno_node_state", "The state of each node; always 1.", ["node", "state"], states),
    ]
