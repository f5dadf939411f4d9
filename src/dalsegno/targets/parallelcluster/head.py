"""The head node's side of a cluster on ParallelCluster: what the controller, the observer and people there use.

clustermgtd, ParallelCluster's daemon, owns the nodes: once a minute it replaces nodes that are down, or drained and
idle. So a drain is a replacement, and a node is repaired by telling Slurm, never by changing its machine. Reasons that
clustermgtd wrote are never cleared, and no MAINT reservation is made: some releases replace its nodes without end.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.base import (
    ClusterPhase,
    ClusterStatus,
    ClusterSummary,
    DaemonLog,
    NodeTimes,
    Plan,
    Removal,
    RootUse,
    Say,
    ShellEntry,
)
from dalsegno.targets.cloud.node_plans import LOGS, PATH
from dalsegno.targets.folder import read_applied
from dalsegno.targets.parallelcluster.folder import PclusterFolder, read_state
from dalsegno.targets.parallelcluster.status import KIND, read_status

SLURMCTLD_PORT = 6820  # the first of those that ParallelCluster gives slurmctld
TIMES = NodeTimes(boot_s=1800.0, gone_s=60.0)  # clustermgtd's limit for a replacement, and its interval
PREFIX = "dalsegno:"  # of all reasons that the controller writes
REASON = f"{PREFIX}replace"


@dataclasses.dataclass(frozen=True)
class NodeCommand:
    """The words after `scontrol` that carry out a repair in ParallelCluster's way."""

    words: tuple[str, ...]


def is_dynamic(node: str) -> bool:
    """Return whether a node is started on demand: `train-dy-train-1`; static nodes have `-st-`."""
    return "-dy-" in node


def replace_command(node: str, reason: str) -> NodeCommand:
    """Return how a machine is replaced.

    A dynamic node is powered down at once and started again for the next job. A static node is set down: clustermgtd
    terminates its machine and starts another under the same name.
    """
    state = "POWER_DOWN_FORCE" if is_dynamic(node) else "DOWN"
    return NodeCommand(("update", f"NodeName={node}", f"State={state}", f"Reason={reason}"))


def reboot_command(node: str, reason: str) -> NodeCommand:
    """Return how a machine is rebooted. clustermgtd leaves a node alone that Slurm itself reboots."""
    return NodeCommand(("reboot", "ASAP", "nextstate=RESUME", f"reason={reason}", node))


def reason_to_keep(found: str) -> str | None:
    """Return the reason to give Slurm: the controller's own again. None: clustermgtd or a person wrote the present one,
    and takes care of the node."""
    if not found:
        return REASON
    return found if found.startswith(PREFIX) else None


class PclusterHead:
    """The cluster in the state folder of its head node. It is changed from the operator's machine only."""

    def __init__(self, folder: Path, runner: Runner | None = None) -> None:
        self.folder = PclusterFolder(folder)
        self.runner = runner or LocalRunner()
        self.slurm = self._client()

    @property
    def kind(self) -> str:
        return KIND

    def root_use(self, cluster: Cluster) -> RootUse | None:
        return None

    def plan(self, cluster: Cluster) -> Plan:
        self._refuse("changed")

    def apply(self, plan: Plan, say: Say) -> None:
        self._refuse("changed")

    def import_images(self, plan: Plan, say: Say) -> None:
        self._refuse("changed")

    def removal(self) -> Removal:
        self._refuse("removed")

    def destroy(self, say: Say) -> bool:
        self._refuse("removed")

    def _refuse(self, what: str) -> NoReturn:
        raise TargetError(
            f"{self.folder.name} was created from another machine, and is {what} from there",
            hint="run the command on the machine where you ran `dalsegno up`",
        )

    # Repairs
    def replace(self, node: str) -> None:
        reason = reason_to_keep(self.slurm.node(node).reason)
        if reason is not None:
            self.slurm.scontrol(*replace_command(node, reason).words)

    def reboot(self, node: str) -> None:
        reason = reason_to_keep(self.slurm.node(node).reason)
        if reason is not None:
            self.slurm.scontrol(*reboot_command(node, reason).words)

    # Report
    def status(self) -> ClusterStatus:
        slurm = self._client(timeout_s=5.0) if self.slurm_runs() else None
        status = read_status(self.folder.name, read_state(self.folder), read_applied(self.folder), None, (), slurm)
        if status.phase is not ClusterPhase.STOPPED:
            return status
        # ParallelCluster was not asked: here, Slurm's own answer says whether the cluster works.
        problems = () if slurm else ("slurmctld does not run",)
        phase = ClusterPhase.UP if slurm else ClusterPhase.DEGRADED
        return dataclasses.replace(status, phase=phase, problems=problems)

    def summary(self) -> ClusterSummary:
        try:
            state, applied = read_state(self.folder), read_applied(self.folder)
        except DalsegnoError:
            return ClusterSummary(KIND, ClusterPhase.DAMAGED, 0)
        phase = ClusterPhase.GONE if state is None else ClusterPhase.UP if self.slurm_runs() else ClusterPhase.STOPPED
        return ClusterSummary(KIND, phase, len(applied.nodes) if applied else 0)

    def daemon_logs(self) -> list[DaemonLog]:
        return [DaemonLog(socket.gethostname(), path.stem, path) for path in sorted(Path(LOGS).glob("*.log"))]

    def owner(self) -> int | None:
        try:
            return self.folder.root.stat().st_uid
        except OSError:
            return None

    def slurm_as(self, user: str) -> SlurmClient:
        return self._client(["runuser", "-u", user, "--"])

    def slurm_runs(self) -> bool:
        try:
            with socket.create_connection((socket.gethostname(), SLURMCTLD_PORT), timeout=1.0):
                return True
        except OSError:
            return False

    @property
    def controller_socket(self) -> Path:
        return self.folder.controller_socket

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        return {
            "SLURM_CONF": str(self.folder.slurm_conf),
            "PATH": f"/opt/slurm/bin:{env.get('PATH', PATH)}",
            "DALSEGNO_CLUSTER": self.folder.name,
            "DALSEGNO_CONTROLLER": str(self.folder.controller_socket),
        }

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        inner = list(command)
        if host:
            return self.on_node(host, inner, env, cwd)
        if user:
            inner = ["runuser", "-u", user, "--", *(inner or ["/bin/bash", "-l"])]
        return ShellEntry(inner or [env.get("SHELL") or "/bin/bash"], {**env, **self.user_env(env)})

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        # Machines of a cluster have the key of the login user's home, which they share.
        return ShellEntry(["ssh", node, *([shlex.join(command)] if command else [])], dict(env))

    def job_images(self) -> str:
        return ""

    @property
    def node_times(self) -> NodeTimes:
        return TIMES

    def _client(self, prefix: Sequence[str] = (), timeout_s: float = 30) -> SlurmClient:
        env = {"PATH": PATH, "SLURM_CONF": str(self.folder.slurm_conf), "HOME": os.environ.get("HOME", "/")}
        return SlurmClient(self.runner, env, prefix=prefix, timeout_s=timeout_s)
