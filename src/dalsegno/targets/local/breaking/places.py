"""Being inside a node's host, or its switch, for a moment."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.system.processes import Completed
from dalsegno.targets.local.nodes import LocalNodes


def in_mounts(nodes: LocalNodes, node: str, argv: Sequence[str]) -> Completed:
    """Run a command with the files that the node sees. With its PIDs too: umount asks /proc/self, which is that of a
    process there."""
    return nodes.runner.run(["nsenter", "-t", str(nodes.host(node).pid), "-m", "-p", "--", *argv], timeout_s=30)


def in_switch(nodes: LocalNodes, argv: Sequence[str]) -> Completed:
    return nodes.runner.run(["nsenter", "-t", str(nodes.switch().pid), "-n", "--", *argv], timeout_s=30)


def in_network(nodes: LocalNodes, node: str, argv: Sequence[str]) -> Completed:
    return nodes.runner.run(["nsenter", "-t", str(nodes.host(node).pid), "-n", "--", *argv], timeout_s=30)
