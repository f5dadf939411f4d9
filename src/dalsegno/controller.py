"""The program `controller`: open the cluster in a state folder and run its controller."""

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
from dalsegno.recovery.decisions.policy import Policy
from dalsegno.recovery.decisions.reason import SLURM_USERS
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import owner_name
from dalsegno.system.processes import LocalRunner
from dalsegno.targets.base import HasMachines, Target
from dalsegno.targets.folder import ClusterFolder, read_applied
from dalsegno.targets.machines import ReturnsNodes
from dalsegno.targets.registry import open_existing

SLURM_S = 15.0  # time limit for Slurm's commands; they fail sooner if slurmctld does not answer


def main(arguments: list[str]) -> int:
    """Run `controller STATE-FOLDER [--agents HOST:PORT]` and return the exit code."""
    start_logging("controller")
    folder, *rest = arguments
    if rest and (len(rest) != 2 or rest[0] != "--agents" or not rest[1].rpartition(":")[2].isdecimal()):
        log.error("usage: controller STATE-FOLDER [--agents HOST:PORT]")
        return 2
    return serve(Path(folder), ClusterSite(Path(folder), os.environ), rest[1] if rest else "")


class ClusterSite:
    """A cluster, from the files in its state folder. The applied cluster file is read again when it has changed."""

    def __init__(self, root: Path, env: Mapping[str, str]) -> None:
        self.folder, self.env = ClusterFolder(root), env
        self._read_at = 0
        self._cluster: Cluster | None = None

    @cached_property
    def slurm(self) -> SlurmClient:
        return SlurmClient(LocalRunner(), self.env, timeout_s=SLURM_S)

    @cached_property
    def target(self) -> Target:
        return open_existing(self.folder.root)

    @cached_property
    def slurm_users(self) -> frozenset[str]:
        """Return the users that slurmctld may run as. If the cluster was created without root, slurmctld runs as the
        cluster's owner."""
        return SLURM_USERS | {owner_name(self.folder.root)}

    def policy(self) -> Policy:
        cluster = self._read_cluster()
        spares = frozenset(node.name for node in cluster.nodes if node.spare)
        remedies, times = remedies_of(self.target), self.target.node_times
        machines = self.target.machines() if isinstance(self.target, HasMachines) else {}
        limits = {"boot_s": times.boot_s, "gone_s": times.gone_s}
        returns = isinstance(self.target, ReturnsNodes) and self.target.returns_nodes
        return Policy.of(cluster.health, remedies, spares, self.slurm_users, machines, returns, **limits)

    def is_being_changed(self) -> bool:
        try:
            with open(self.folder.lock, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False  # the lock file does not exist yet
        return False

    def _read_cluster(self) -> Cluster:
        stamp = _stamp(self.folder.applied)
        if self._cluster is None or stamp != self._read_at:
            cluster = read_applied(self.folder)
            if cluster is None:
                raise DalsegnoError(f"cluster {self.folder.name} does not exist yet", hint="`dalsegno up` creates it")
            self._cluster, self._read_at = cluster, stamp
        return self._cluster


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
