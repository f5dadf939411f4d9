"""`sinfo`: partitions, and how many of their nodes are in which state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.slurm.parse.jobs import node_names
from dalsegno.slurm.parse.text import duration_s, long_format, malformed, records
from dalsegno.slurm.states import NodeFlag, NodeState, parse_node_state

_FIELDS = ("Partition", "Available", "Time", "StateComplete", "NodeList")

PARTITIONS_ARGV = ("sinfo", "--all", "--noheader", "--Format", long_format(_FIELDS))

State = tuple[NodeState, frozenset[NodeFlag]]


@dataclass(frozen=True)
class PartitionInfo:
    """A partition and its nodes by state."""

    name: str
    default: bool = False
    up: bool = True
    time_limit_s: int | None = None  # None: no limit
    nodes: Mapping[str, State] = field(default_factory=dict)


def parse_partitions(text: str) -> list[PartitionInfo]:
    """The answer to PARTITIONS_ARGV: a row for each partition and state."""
    found: dict[str, PartitionInfo] = {}
    for name, available, limit, state, nodes in records("sinfo", text, len(_FIELDS)):
        bare = name.rstrip("*")
        if not bare:
            raise malformed("sinfo", name)
        earlier = found[bare].nodes if bare in found else {}
        found[bare] = PartitionInfo(
            name=bare,
            default=name.endswith("*"),
            up=available == "up",
            time_limit_s=duration_s(limit),
            nodes={**earlier, **dict.fromkeys(node_names("sinfo", nodes), parse_node_state(state))},
        )
    return list(found.values())
