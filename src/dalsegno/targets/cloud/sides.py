"""The two sides of a cluster on a cloud: the operator's machine, and the head, where the platform runs slurmctld.

Each cloud target derives a class from both and adds what is specific to its platform.
"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeInfo
from dalsegno.spec.facts import Cluster
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.base import (
    ClusterPhase,
    ClusterStatus,
    ClusterSummary,
    DaemonLog,
    NodeStatus,
    NodeTimes,
    Plan,
    Removal,
    RootUse,
    Say,
    ShellEntry,
    job_status,
)
from dalsegno.targets.cloud.node_plans import LOGS, PATH
from dalsegno.targets.folder import ClusterFolder, read_applied

# A replaced machine takes 20 to 30 minutes to join. The platform reacts to a lost node within a minute.
TIMES = NodeTimes(boot_s=3600.0, gone_s=60.0)


def node_status(node: NodeInfo) -> NodeStatus:
    """Return the status of a node as Slurm reports it."""
    return NodeStatus(
        node.name, node.state_text.lower(), node.reason, node.partitions, node.gpus, node.gpus_used, node.gpu_type,
        node.address, reason_user=node.reason_user,
    )  # fmt: skip


class CloudSide:
    """What both sides share: a state folder, and nothing that needs root on this machine."""

    folder: ClusterFolder
    times = TIMES

    @property
    def kind(self) -> str:
        """The name of the target in cluster files."""
        raise NotImplementedError

    def root_use(self, cluster: Cluster) -> RootUse | None:
        return None

    def owner(self) -> int | None:
        try:
            return self.folder.root.stat().st_uid
        except OSError:
            return None

    @property
    def controller_socket(self) -> Path:
        return self.folder.controller_socket  # only the head has a controller

    def job_images(self) -> str:
        return ""

    @property
    def node_times(self) -> NodeTimes:
        return self.times


class OperatorSide(CloudSide):
    """The machine where `dalsegno up` is run. Slurm and the logs are elsewhere."""

    def import_images(self, plan: Plan, say: Say) -> None:
        """Do nothing: images are imported on the cluster."""

    def daemon_logs(self) -> list[DaemonLog]:
        return []

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        raise TargetError(
            f"{self.folder.name} is on other machines; its Slurm cannot be used from this shell",
            hint="`dalsegno shell` opens a shell on its login node or controller",
        )


class HeadSide(CloudSide):
    """The head. The cluster is changed from the operator's machine only: `up` and `down` refuse here."""

    slurmctld_port = 6817

    def __init__(self, folder: Path, runner: Runner | None = None) -> None:
        self.folder = ClusterFolder(folder)
        self.runner = runner or LocalRunner()
        self.slurm = self._client()

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

    def status(self) -> ClusterStatus:
        """Return the status from Slurm. Only the operator's machine calls the platform's API."""
        name, kind = self.folder.name, self.kind
        if not self.slurm_runs():
            return ClusterStatus(name, kind, ClusterPhase.DEGRADED, jobs=None, problems=("slurmctld does not run",))
        slurm = self._client(timeout_s=5.0)
        nodes = tuple(node_status(node) for node in slurm.nodes())
        return ClusterStatus(name, kind, ClusterPhase.UP, nodes, (), tuple(job_status(job) for job in slurm.jobs()))

    def summary(self) -> ClusterSummary:
        try:
            applied = read_applied(self.folder)
        except DalsegnoError:
            return ClusterSummary(self.kind, ClusterPhase.DAMAGED, 0)
        phase = ClusterPhase.UP if self.slurm_runs() else ClusterPhase.STOPPED
        return ClusterSummary(self.kind, phase, len(applied.nodes) if applied else 0)

    def daemon_logs(self) -> list[DaemonLog]:
        return [DaemonLog(socket.gethostname(), path.stem, path) for path in sorted(Path(LOGS).glob("*.log"))]

    def slurm_as(self, user: str) -> SlurmClient:
        return self._client(["runuser", "-u", user, "--"])

    def slurm_runs(self) -> bool:
        try:
            with socket.create_connection((socket.gethostname(), self.slurmctld_port), timeout=1.0):
                return True
        except OSError:
            return False

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": f"/opt/slurm/bin:{env.get('PATH', PATH)}",
            "SLURM_CONF": str(self.folder.slurm_conf),
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
        if host:
            return self.on_node(host, command, env, cwd)
        inner = ["runuser", "-u", user, "--", *(command or ["/bin/bash", "-l"])] if user else list(command)
        return ShellEntry(inner or [env.get("SHELL") or "/bin/bash"], {**env, **self.user_env(env)})

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        return ShellEntry(["ssh", "--", node, *([shlex.join(command)] if command else [])], dict(env))

    def _client(self, prefix: Sequence[str] = (), timeout_s: float = 30) -> SlurmClient:
        env = {"PATH": PATH, "SLURM_CONF": str(self.folder.slurm_conf)}
        return SlurmClient(self.runner, env, prefix=prefix, timeout_s=timeout_s)
