"""`scontrol show node`: everything Slurm knows of each node."""

from __future__ import annotations

import re

from dalsegno.slurm.node_info import NodeInfo
from dalsegno.slurm.parse.text import epoch, integer, known, malformed, pairs, paragraphs
from dalsegno.slurm.parse.tres import gpu_type_in_gres, gpus_in_gres, gpus_in_tres
from dalsegno.slurm.states import parse_node_state

NODES_ARGV = ("scontrol", "--all", "--details", "--oneliner", "show", "node")

_COMMAND = "scontrol show node"
_REASON = re.compile(r"(.*?)\s*\[([^\s\[\]@]+)@([^\[\]]*)\]", re.DOTALL)


def parse_nodes(text: str) -> list[NodeInfo]:
    """Read the answer to NODES_ARGV: one node a line. One that cannot be read is left out."""
    if text.startswith("No nodes in the system"):
        return []
    found = paragraphs(_COMMAND, text, "NodeName")
    nodes = [node for line in found if (node := _node(line)) is not None]
    if not nodes:
        raise malformed(_COMMAND, found[0])
    return nodes


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
