"""Which nodes may call, and where they are: those that have a secret, with what Slurm says of their place."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.wire import is_node_name, read_secret
from dalsegno.recovery.probes import Place, family_of
from dalsegno.slurm.node_info import NodeInfo

SLURMD_PORT = 6818


class Roster:
    """A folder with a file for each node: its secret. It may change at any time, and is looked at again."""

    def __init__(self, secrets: Path) -> None:
        self._secrets, self._places = secrets, dict[str, Place]()

    def secret_of(self, node: str) -> bytes | None:
        """Read each time: a machine that was replaced has another."""
        if not is_node_name(node):
            return None
        try:
            return read_secret(self._secrets / node)
        except DalsegnoError:
            return None

    def learn(self, nodes: Iterable[NodeInfo], slurmd_port: int = SLURMD_PORT) -> None:
        """Where Slurm says that they are. A node without an address there is asked where its agent calls from."""
        for node in nodes:
            address = node.address if family_of(node.address) else ""
            self._places[node.name] = Place(address, node.port or slurmd_port)

    def places(self) -> dict[str, Place]:
        try:
            names = os.listdir(self._secrets)
        except OSError:
            return {}
        return {name: self._places.get(name, Place("")) for name in sorted(names) if is_node_name(name)}
