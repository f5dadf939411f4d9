"""`scontrol show node`: everything Slurm knows of each node."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.slurm.parse.text import epoch, integer, known, malformed, pairs
from dalsegno.slurm.parse.tres import gpu_type_in_gres, gpus_in_gres, gpus_in_tres
from dalsegno.slurm.states import NodeFlag, NodeState, parse_node_state

NODES_ARGV = ("scontrol", "--all", "--details", "--oneliner", "show", "node")

_REASON = re.compile(r"(.*?)\s*\[([^\s\[\]@]+)@([^\[\]]*)\]", re.DOTALL)


@dataclass(frozen=True)
class NodeInfo:
    """A node as Slurm sees it. Times are seconds since 1970."""

    name: str
    state: NodeState
    flags: frozenset[NodeFlag] = frozenset()
    state_text: str = ""  # as Slurm wrote it
    reason: str = ""
    reason_user: str = ""
    reason_at: int | None = None
    partitions: tuple[str, ...] = ()
    gpus: int = 0
    gpus_used: int = 0
    gpu_type: str = ""
    cpus: int = 0
    cpus_used: int = 0
    memory_mib: int = 0
    memory_used_mib: int = 0
    address: str = ""
    hostname: str = ""
    port: int = 0
    features: tuple[str, ...] = ()
    weight: int = 1
    version: str = ""
    booted_at: int | None = None
    slurmd_started_at: int | None = None

    @property
    def drained(self) -> bool:
        """Out of service, and no job left on it."""
        return self.draining and self.state not in (NodeState.ALLOCATED, NodeState.MIXED) and not self.completing

    @property
    def draining(self) -> bool:
        """Taken out of service, with or without jobs still on it."""
        return NodeFlag.DRAIN in self.flags

    @property
    def completing(self) -> bool:
        return NodeFlag.COMPLETING in self.flags

    @property
    def down(self) -> bool:
        return self.state in (NodeState.DOWN, NodeState.ERROR)

    @property
    def responding(self) -> bool:
        return NodeFlag.NOT_RESPONDING not in self.flags

    @property
    def in_service(self) -> bool:
        """Slurm would start a job here, now or when the present ones end."""
        busy_or_free = self.state in (NodeState.IDLE, NodeState.MIXED, NodeState.ALLOCATED)
        return busy_or_free and self.responding and not self.flags & _OUT_OF_SERVICE


_OUT_OF_SERVICE = {
    NodeFlag.DRAIN,
    NodeFlag.FAIL,
    NodeFlag.INVALID_REG,
    NodeFlag.MAINTENANCE,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.REBOOT_ISSUED,
}


def parse_nodes(text: str) -> list[NodeInfo]:
    """The answer to NODES_ARGV: one node a line."""
    if not text.strip() or text.startswith("No nodes in the system"):
        return []
    starts = [match.start() for match in re.finditer(r"^NodeName=", text, re.MULTILINE)]
    if not starts or text[: starts[0]].strip():
        raise malformed("scontrol show node", text)
    ends = [*starts[1:], len(text)]
    return [_node(text[start:end]) for start, end in zip(starts, ends, strict=True)]


def _node(line: str) -> NodeInfo:
    facts = pairs(line)
    if not facts.get("NodeName") or "State" not in facts:
        raise malformed("scontrol show node", line)
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
    """Reason, who set it, when. A reason may itself look like `Key=Value`, so it is taken from the whole line."""
    if not known(short):
        return "", "", None
    text = line[line.index(" Reason=") + len(" Reason=") :] if " Reason=" in line else short
    found = _REASON.match(text)
    if found is None:  # set in slurm.conf: nobody's, no time
        return re.split(r"\s(?:Comment|Extra)=", text)[0].strip(), "", None
    return found[1].strip(), found[2], epoch(found[3])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in known(text).split(",") if name.strip())
