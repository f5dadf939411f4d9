"""Parse `scontrol show partition` and `scontrol show topology`: how a running cluster is configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dalsegno.slurm.parse.jobs import node_names
from dalsegno.slurm.parse.text import duration_s, integer, known, malformed, optional_integer, pairs, paragraphs

PARTITION_SETTINGS_ARGV = ("scontrol", "--all", "--oneliner", "show", "partition")
TOPOLOGY_ARGV = ("scontrol", "--oneliner", "show", "topology")

_COMMAND = "scontrol show partition"
_EVERYBODY = frozenset({"", "ALL"})
# Settings that are not copied to `extra`: settings with their own field here, computed settings, and settings without
# information.
_READ = frozenset(
    {
        *("PartitionName", "AllowGroups", "AllowAccounts", "AllowQos", "Default", "DefaultTime", "Hidden", "MaxNodes"),
        *("MaxTime", "MinNodes", "Nodes", "NodeSets", "PriorityJobFactor", "PriorityTier", "OverSubscribe"),
        *("PreemptMode", "State", "TotalCPUs", "TotalNodes", "TRES", "AllocNodes"),
    }
)
# Values of further settings that are equivalent to an unset setting.
_DEFAULTS = frozenset({"", "NO", "NONE", "N/A", "(NULL)", "UNLIMITED", "0", "ALL"})


@dataclass(frozen=True)
class PartitionSettings:
    """A partition as slurmctld reports it.

    Times are in seconds. None means no limit. An empty `allow_` field means that everybody may use the partition.
    """

    name: str
    nodes: tuple[str, ...] = ()
    default: bool = False
    up: bool = True
    hidden: bool = False
    max_time_s: int | None = None
    default_time_s: int | None = None
    max_nodes: int | None = None
    min_nodes: int = 0
    priority_tier: int = 1
    priority_job_factor: int = 1
    oversubscribe: str = "NO"
    preempt_mode: str = ""
    allow_accounts: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)  # further settings that differ from their defaults


def parse_partition_settings(text: str) -> list[PartitionSettings]:
    """Parse the output of PARTITION_SETTINGS_ARGV, which has one line per partition."""
    return [_partition(each) for each in _records(text)]


def parse_raw_partitions(text: str) -> dict[str, Mapping[str, str]]:
    """Parse the output of PARTITION_SETTINGS_ARGV. Return the values of each partition as slurmctld prints them."""
    return {each["PartitionName"]: each for each in _records(text) if each.get("PartitionName")}


def _records(text: str) -> list[dict[str, str]]:
    if text.startswith("No partitions in the system"):
        return []
    return [pairs(line) for line in paragraphs(_COMMAND, text, "PartitionName")]


def _partition(facts: Mapping[str, str]) -> PartitionSettings:
    name = facts.get("PartitionName", "")
    if not name:
        raise malformed(_COMMAND, str(facts))
    nodes = known(facts.get("Nodes", ""))
    return PartitionSettings(
        name=name,
        nodes=tuple(node_names(_COMMAND, nodes)) if nodes else (),
        default=facts.get("Default") == "YES",
        up=facts.get("State", "UP") == "UP",
        hidden=facts.get("Hidden") == "YES",
        max_time_s=duration_s(facts.get("MaxTime", "")),
        default_time_s=duration_s(facts.get("DefaultTime", "")),
        max_nodes=optional_integer(facts.get("MaxNodes", "")),
        min_nodes=integer(facts.get("MinNodes", "")),
        priority_tier=integer(facts.get("PriorityTier", ""), 1),
        priority_job_factor=integer(facts.get("PriorityJobFactor", ""), 1),
        oversubscribe=known(facts.get("OverSubscribe", "")) or "NO",
        preempt_mode=known(facts.get("PreemptMode", "")),
        allow_accounts=_allowed(facts.get("AllowAccounts", "")),
        allow_groups=_allowed(facts.get("AllowGroups", "")),
        allow_qos=_allowed(facts.get("AllowQos", "")),
        extra={key: value for key, value in facts.items() if key not in _READ and value.upper() not in _DEFAULTS},
    )


def _allowed(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in known(text).split(",") if name.strip())
    return () if set(names) <= _EVERYBODY else names


@dataclass(frozen=True)
class SwitchInfo:
    """A switch of the network topology. A leaf switch has no switches below it."""

    name: str
    level: int = 0
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


def parse_topology(text: str) -> list[SwitchInfo]:
    """Parse the output of TOPOLOGY_ARGV; an empty list for a topology that is not a tree."""
    lines = [line for line in text.splitlines() if line.startswith("SwitchName=")]
    return [_switch(pairs(line)) for line in lines]


def _switch(facts: Mapping[str, str]) -> SwitchInfo:
    nodes, below = known(facts.get("Nodes", "")), known(facts.get("Switches", ""))
    return SwitchInfo(
        name=facts.get("SwitchName", ""),
        level=integer(facts.get("Level", "")),
        nodes=tuple(node_names("scontrol show topology", nodes)) if nodes else (),
        switches=tuple(node_names("scontrol show topology", below)) if below else (),
    )
