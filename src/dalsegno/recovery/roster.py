"""Which nodes may call, and where they are: those that have a secret, with what slurm.conf says of their place."""

from __future__ import annotations

import os
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.expected import slurmd_places
from dalsegno.health.wire import is_node_name, read_secret
from dalsegno.recovery.probes import Place, family_of
from dalsegno.system.files import read_text


class Roster:
    """A folder with a file for each node: its secret. Both it and slurm.conf may change at any time."""

    def __init__(self, secrets: Path, slurm_conf: Path) -> None:
        self._secrets, self._slurm_conf = secrets, slurm_conf
        self._places, self._read = dict[str, Place](), (0, 0)  # when slurm.conf was written, and its size

    def secret_of(self, node: str) -> bytes | None:
        """Read each time: a machine that was replaced has another."""
        if not is_node_name(node):
            return None
        try:
            return read_secret(self._secrets / node)
        except DalsegnoError:
            return None

    def places(self) -> dict[str, Place]:
        """Of a node that slurm.conf names without an address, it is asked where its agent calls from."""
        self._read_again()
        try:
            names = os.listdir(self._secrets)
        except OSError:
            return {}
        return {name: self._places.get(name, Place("")) for name in sorted(names) if is_node_name(name)}

    def _read_again(self) -> None:
        try:
            found = self._slurm_conf.stat()
        except OSError:
            return  # while it is written anew, what it said before holds
        if (found.st_mtime_ns, found.st_size) != self._read:
            self._read = (found.st_mtime_ns, found.st_size)
            told = slurmd_places(read_text(self._slurm_conf) or "")
            self._places = {name: Place(host if family_of(host) else "", port) for name, (host, port) in told.items()}
