"""Parse `scontrol show node`, sinfo and `sacctmgr show event`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.slurm.facts import NodeFlag, NodeInfo, NodeState, parse_node_state
from dalsegno.slurm.parse.jobs import node_names
from dalsegno.slurm.parse.text import (
    duration_s,
    epoch,
    gpu_indexes_in_gres,
    gpu_type_in_gres,
    gpus_in_gres,
    gpus_in_tres,
    integer,
    known,
    long_format,
    malformed,
    pairs,
    paragraphs,
    records,
)

NODES_ARGV = ("scontrol", "--all", "--details", "--oneliner", "show", "node")

_COMMAND = "scontrol show node"
_MEASUREMENTS = re.compile(r" (?:CPULoad|FreeMem|LastBusyTime|CurrentWatts|AveWatts)=\S*")
_REASON = re.compile(r"(.*?)\s*\[([^\s\[\]@]+)@([^\[\]]*)\]", re.DOTALL)


class NodeParser:
    """Parses the output of NODES_ARGV, which has one record per node. Nodes that cannot be parsed are omitted.

    A record that did not change since the last call is not parsed again: a large cluster is queried every second.
    """

    def __init__(self) -> None:
        self._parsed: dict[str, NodeInfo | None] = {}

    def parse(self, text: str) -> list[NodeInfo]:
        if text.startswith("No nodes in the system"):
            return []
        found = paragraphs(_COMMAND, text, "NodeName")
        before = self._parsed
        records = map(_without_measurements, found)
        self._parsed = now = {each: before[each] if each in before else _node(each) for each in records}
        nodes = [node for node in now.values() if node is not None]
        if not nodes:
            raise malformed(_COMMAND, found[0])
        return nodes


def parse_nodes(text: str) -> list[NodeInfo]:
    return NodeParser().parse(text)


def _without_measurements(record: str) -> str:
    """Remove fields that change often and are not read. A reason, which is free text, stays as it is."""
    fields, separator, reason = record.partition(" Reason=")
    return _MEASUREMENTS.sub("", fields) + separator + reason


def _node(line: str) -> NodeInfo | None:
    facts = pairs(line)
    if not facts.get("NodeName") or "State" not in facts:
        return None
    state, flags = parse_node_state(facts["State"])
    reason, user, at = _reason(facts.get("Reason", ""), line)
    gres = known(facts.get("Gres", ""))
    return NodeInfo(
        name=facts["NodeName"],
        state=state,
        flags=flags,
        state_text=facts["State"],
        reason=reason,
        reason_user=user,
        reason_at=at,
        partitions=_names(facts.get("Partitions", "")),
        gpus=gpus_in_gres(gres) or gpus_in_tres(facts.get("CfgTRES", "")),
        gpus_used=_gpus_used(facts),
        gpu_indexes=gpu_indexes_in_gres(known(facts.get("GresUsed", ""))),
        gpu_type=gpu_type_in_gres(gres),
        cpus=integer(facts.get("CPUTot", "")),
        cpus_used=integer(facts.get("CPUAlloc", "")),
        memory_mib=integer(facts.get("RealMemory", "")),
        memory_used_mib=integer(facts.get("AllocMem", "")),
        address=known(facts.get("NodeAddr", "")),
        hostname=known(facts.get("NodeHostName", "")),
        port=integer(facts.get("Port", "")),
        features=_names(facts.get("AvailableFeatures", "")),
        weight=integer(facts.get("Weight", ""), 1),
        version=known(facts.get("Version", "")),
        booted_at=epoch(facts.get("BootTime", "")),
        slurmd_started_at=epoch(facts.get("SlurmdStartTime", "")),
    )


def _gpus_used(facts: dict[str, str]) -> int:
    used = known(facts.get("GresUsed", ""))
    return gpus_in_gres(used) if used else gpus_in_tres(facts.get("AllocTRES", ""))


def _reason(short: str, line: str) -> tuple[str, str, int | None]:
    """Return the reason, its user and its time. The whole line is parsed, because a reason may contain `Key=Value`."""
    if not known(short):
        return "", "", None
    text = line[line.index(" Reason=") + len(" Reason=") :] if " Reason=" in line else short
    found = _REASON.match(text)
    if found is None:  # a reason set in slurm.conf has no user and no time
        return re.split(r"\s(?:Comment|Extra)=", text)[0].strip(), "", None
    return found[1].strip(), found[2], epoch(found[3])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in known(text).split(",") if name.strip())


_SINFO_FIELDS = ("Partition", "Available", "Time", "StateComplete", "NodeList")

PARTITIONS_ARGV = ("sinfo", "--all", "--noheader", "--Format", long_format(_SINFO_FIELDS))

State = tuple[NodeState, frozenset[NodeFlag]]


@dataclass(frozen=True)
class PartitionInfo:
    """A partition and the states of its nodes."""

    name: str
    default: bool = False
    up: bool = True
    time_limit_s: int | None = None  # None: no limit
    nodes: Mapping[str, State] = field(default_factory=dict)


def parse_partitions(text: str) -> list[PartitionInfo]:
    """Parse the output of PARTITIONS_ARGV: one row per partition and state."""
    found: dict[str, PartitionInfo] = {}
    for name, available, limit, state, nodes in records("sinfo", text, len(_SINFO_FIELDS)):
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


# When a node returns to service, slurmctld forgets why it was out of service, but the accounting database keeps the
# reason. A reason may contain anything, even the field separator, so it is the last field.
_EVENT_FIELDS = ("NodeName", "TimeStart", "State", "User", "Reason")
EVENTS_ARGV = ("sacctmgr", "--noheader", "--parsable2", "show", "event", f"format={','.join(_EVENT_FIELDS)}")


@dataclass(frozen=True)
class NodeEvent:
    """One time when a node left service. `at` is a Unix time."""

    node: str
    at: int
    state: str  # for example DRAIN or DOWN
    user: str
    reason: str


def parse_events(text: str) -> list[NodeEvent]:
    """Parse the output of EVENTS_ARGV. Events about the whole cluster are omitted."""
    rows = [line.split("|", len(_EVENT_FIELDS) - 1) for line in text.splitlines()]
    return [_event(*row, at=at) for row in rows if len(row) == len(_EVENT_FIELDS) and row[0] and (at := epoch(row[1]))]


def _event(node: str, _: str, state: str, user: str, reason: str, *, at: int) -> NodeEvent:
    return NodeEvent(node, at, state, known(re.sub(r"\(\d+\)$", "", user)), reason)
