"""A node: whether it is in service, and if not, who took it out and what for. Pure."""

from __future__ import annotations

import re

from dalsegno.slurm.node_info import NodeInfo
from dalsegno.slurm.states import NodeFlag
from dalsegno.why.answer import Verdict

_OURS = re.compile(r"dalsegno:(\w+)(?::([\w-]+)(?:\[([^\]]*)\])?)?\s*(.*)")
_DOES = {
    "drain": "it is only taken out of service: somebody has to look at it",
    "reset": "its GPUs are being reset",
    "reboot": "it is being booted anew",
    "replace": "another machine takes its place",
    "validate": "it is being tried out before it comes back",
}


def explain_node(node: NodeInfo) -> Verdict:
    """From the outside in: what Slurm does not hear of, what somebody took out, what runs."""
    found = _OURS.match(node.reason)
    if found and found[1] == "spare":
        return Verdict(f"{node.name} is a spare: validated, and kept for a run that loses a node", "dalsegno runs")
    if found and (node.draining or node.down):
        return Verdict(
            f"{node.name} is out of service by our own hand: {_fault(found)}", f"dalsegno nodes show {node.name}"
        )
    if node.draining:
        by = f" by {node.reason_user}" if node.reason_user else ""
        return Verdict(
            f"{node.name} was drained{by}: {node.reason or 'no reason given'}; what others drain, we leave alone",
            f"scontrol update nodename={node.name} state=resume",
        )
    return _by_state(node)


def _fault(found: re.Match[str]) -> str:
    code = f" {found[3]}" if found[3] else ""
    fault = f"{found[2]}{code}" if found[2] else found[1]
    said = f" ({found[4]})" if found[4] else ""
    return f"{fault}{said}; {_DOES.get(found[1], found[1])}"


def _by_state(node: NodeInfo) -> Verdict:
    name = node.name
    if node.down or not node.responding:
        why = f": {node.reason}" if node.reason else ""
        return Verdict(f"{name} does not answer Slurm{why}", f"dalsegno health --node {name}")
    if NodeFlag.INVALID_REG in node.flags:
        return Verdict(f"{name} has other hardware than slurm.conf says: {node.reason}", f"scontrol show node {name}")
    if not node.in_service:
        return Verdict(f"{name} is {node.state_text or node.state.value.lower()}", f"scontrol show node {name}")
    used = f", {node.gpus_used} of {node.gpus} GPUs in use" if node.gpus else ""
    return Verdict(f"{name} is in service ({node.state.value.lower()}{used})")
