"""The controller's program: opens the cluster it stands in, and serves."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.log import start_logging
from dalsegno.recovery.act import remedies_of
from dalsegno.recovery.controller import log, serve
from dalsegno.recovery.policy import Policy
from dalsegno.recovery.reason import SLURM_USERS
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import owner_name
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.local.folder import Folder, read_applied
from dalsegno.targets.local.machine_room_client import MachineRoom

SLURM_S = 15.0  # longer than it takes Slurm's commands to say that nobody answers
BOOT_S = 30.0  # a virtual host boots in half a second
GONE_S = 3.0  # what comes back within it was a cable, not a host; one without power is not waited for


def main(arguments: list[str]) -> int:
    """`controller STATE-FOLDER [--agents HOST:PORT]`."""
    start_logging("controller")
    folder, *rest = arguments
    if rest and (len(rest) != 2 or rest[0] != "--agents" or not rest[1].rpartition(":")[2].isdecimal()):
        log.error("usage: controller STATE-FOLDER [--agents HOST:PORT]")
        return 2
    return serve(Path(folder), LocalSite(Path(folder), os.environ), rest[1] if rest else "")


class LocalSite:
    """A local cluster, from the files in its state folder; they are read again when they are others."""

    def __init__(self, root: Path, env: Mapping[str, str]) -> None:
        self.folder, self.env = Folder(root), env
        self._read_at = 0
        self._cluster: Cluster | None = None

    @cached_property
    def slurm(self) -> SlurmClient:
        return SlurmClient(LocalRunner(), self.env, timeout_s=SLURM_S)

    @cached_property
    def target(self) -> MachineRoom:
        return MachineRoom(self.folder.root)

    @cached_property
    def slurm_users(self) -> frozenset[str]:
        """Without root, slurmctld is its owner's."""
        return SLURM_USERS | {owner_name(self.folder.root)}

    def policy(self) -> Policy:
        cluster = self._look()
        spares = frozenset(node.name for node in cluster.nodes if node.spare)
        return Policy.of(
            cluster.health, remedies_of(self.target), spares, self.slurm_users, boot_s=BOOT_S, gone_s=GONE_S
        )

    def is_being_changed(self) -> bool:
        try:
            with open(self.folder.lock, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # there never was one
        return False

    def _look(self) -> Cluster:
        stamp = _stamp(self.folder.applied)
        if self._cluster is None or stamp != self._read_at:
            cluster = read_applied(self.folder)
            if cluster is None:
                raise DalsegnoError(f"cluster {self.folder.name} is not there yet", hint="`dalsegno up` makes it")
            self._cluster, self._read_at = cluster, stamp
        return self._cluster


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
