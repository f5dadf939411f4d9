"""Which nodes have failed, by what Slurm and the nodes themselves say. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dalsegno.launch.vacating import to_be_mended
from dalsegno.slurm.facts import NodeFlag, NodeInfo

_GONE = {NodeFlag.FAIL, NodeFlag.POWERED_DOWN, NodeFlag.POWERING_DOWN, NodeFlag.REBOOT_ISSUED, NodeFlag.INVALID_REG}


def failures(nodes: Iterable[NodeInfo], silent: Collection[str]) -> dict[str, str]:
    """Node → why nothing should be started there. That somebody else drains a node is no failure of it."""
    found = {node.name: _why(node, silent) for node in nodes}
    return {name: why for name, why in found.items() if why}


def unsettled(nodes: Iterable[NodeInfo], bad: Collection[str]) -> list[str]:
    """Those that have failed, and for which Slurm has not drawn any conclusion yet."""
    return [node.name for node in nodes if node.name in bad and not node.down and not node.draining]


def _why(node: NodeInfo, silent: Collection[str]) -> str:
    if mended := to_be_mended([node]).get(node.name):
        return mended
    if node.down:
        return node.reason or "down"
    if node.name in silent or not node.responding:
        return "does not answer"
    return node.state_text if node.flags & _GONE else ""
