"""Being inside a node's host, or its switch, for a moment."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.system.processes import Completed
from dalsegno.targets.local.nodes import Nodes


def in_mounts(nodes: Nodes, node: str, argv: Sequence[str]) -> Completed:
    """Run a command with the files that the node sees."""
    return nodes.runner.run(["nsenter", "-t", str(nodes.host(node).pid), "-m", "--", *argv], timeout_s=30)


def in_switch(nodes: Nodes, argv: Sequence[str]) -> Completed:
    return nodes.runner.run(["nsenter", "-t", str(nodes.switch().pid), "-n", "--", *argv], timeout_s=30)


def in_network(nodes: Nodes, node: str, argv: Sequence[str]) -> Completed:
    return nodes.runner.run(["nsenter", "-t", str(nodes.host(node).pid), "-n", "--", *argv], timeout_s=30)
