"""Which nodes may call, and where they are: those that have a secret, with what slurm.conf says of their place."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.health.expected import slurmd_places
from dalsegno.health.settings import FILE, read_settings
from dalsegno.health.wire import is_node_name, read_secret
from dalsegno.recovery.probes import Place, family_of
from dalsegno.system.files import read_text
from dalsegno.train.frames import Message


class Roster:
    """A folder with a file for each node: its secret. It, slurm.conf and health.json may change at any time."""

    def __init__(self, secrets: Path, slurm_conf: Path) -> None:
        self._secrets = secrets
        self._slurm_conf, self._checks = _Watched(slurm_conf), _Watched(slurm_conf.with_name(FILE))
        self._places, self._settings = dict[str, Place](), Message()

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

    def settings(self) -> Message:
        """What the cluster file says of checks, for the agents. A damaged file changes nothing."""
        if self._checks.changed():
            with contextlib.suppress(DalsegnoError):
                read_settings(self._checks.path)
                health = json.loads(read_text(self._checks.path) or "{}")
                self._settings = {"checks": health.get("checks", {})}
        return self._settings

    def _read_again(self) -> None:
        if self._slurm_conf.changed():
            told = slurmd_places(read_text(self._slurm_conf.path) or "")
            several = {host for host, count in Counter(host for host, _ in told.values()).items() if count > 1}
            self._places = {
                name: Place(host if family_of(host) else "", port, host in several or host.startswith("127."))
                for name, (host, port) in told.items()
            }


class _Watched:
    """A file that may be written anew. While it is gone, what it said last holds."""

    def __init__(self, path: Path) -> None:
        self.path, self._seen = path, (0, 0)

    def changed(self) -> bool:
        try:
            found = self.path.stat()
        except OSError:
            return False
        before, self._seen = self._seen, (found.st_mtime_ns, found.st_size)
        return before != self._seen
