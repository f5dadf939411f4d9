"""The controller instance's side of a HyperPod cluster: what Dal Segno's controller, the observer and people there use.

HyperPod owns the machines. A node is repaired by a reason in Slurm that HyperPod's agent waits for, word for word.
HyperPod's own recovery and its `--auto-resume` are left alone: runs of Dal Segno restart without them.
"""

from __future__ import annotations

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
from dalsegno.targets.folder import read_applied
from dalsegno.targets.hyperpod.folder import HyperPodFolder, read_hyperpod_state
from dalsegno.targets.machines import InstanceAction

SLURMCTLD_PORT = 6817
# A replacement takes 20 to 30 minutes. HyperPod looks at a lost node within a minute.
TIMES = NodeTimes(boot_s=3600.0, gone_s=60.0)
REASONS = {InstanceAction.REPLACE: "Action:Replace", InstanceAction.REBOOT: "Action:Reboot"}  # exactly these words


def repair_words(action: InstanceAction, node: str) -> tuple[str, ...]:
    """Return the words after `scontrol` that make HyperPod replace or reboot a node."""
    return "update", f"NodeName={node}", "State=FAIL", f"Reason={REASONS[action]}"


class HyperPodHead:
    """The cluster in the state folder of HyperPod's controller. It is changed from the operator's machine only."""

    def __init__(self, folder: Path, runner: Runner | None = None) -> None:
        self.folder = HyperPodFolder(folder)
        self.runner = runner or LocalRunner()
        self.slurm = self._client()

    @property
    def kind(self) -> str:
        return "hyperpod"

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

    def replace(self, node: str) -> None:
        self.slurm.scontrol(*repair_words(InstanceAction.REPLACE, node))

    def reboot(self, node: str) -> None:
        self.slurm.scontrol(*repair_words(InstanceAction.REBOOT, node))

    def status(self) -> ClusterStatus:
        """Return what Slurm says. HyperPod's API is asked from the operator's machine."""
        name, kind = self.folder.name, self.kind
        if not self.slurm_runs():
            return ClusterStatus(name, kind, ClusterPhase.DEGRADED, jobs=None, problems=("slurmctld does not run",))
        slurm = self._client(timeout_s=5.0)
        nodes = tuple(
            NodeStatus(
                node.name, node.state_text.lower(), node.reason, node.partitions, node.gpus, node.gpus_used,
                node.gpu_type, node.address, reason_user=node.reason_user,
            )
            for node in slurm.nodes()
        )  # fmt: skip
        return ClusterStatus(name, kind, ClusterPhase.UP, nodes, (), tuple(job_status(job) for job in slurm.jobs()))

    def summary(self) -> ClusterSummary:
        try:
            state, applied = read_hyperpod_state(self.folder), read_applied(self.folder)
        except DalsegnoError:
            return ClusterSummary(self.kind, ClusterPhase.DAMAGED, 0)
        phase = ClusterPhase.GONE if state is None else ClusterPhase.UP if self.slurm_runs() else ClusterPhase.STOPPED
        return ClusterSummary(self.kind, phase, len(applied.nodes) if applied else 0)

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
        inner = list(command)
        if host:
            return ShellEntry(["ssh", "--", host, *inner], dict(env))
        if user:
            return ShellEntry(["runuser", "-u", user, "--", *(inner or ["/bin/bash", "-l"])], self.user_env(env))
        return ShellEntry(inner or [env.get("SHELL") or "/bin/bash"], {**env, **self.user_env(env)})

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        return ShellEntry(["ssh", "--", node, *command], dict(env))

    def job_images(self) -> str:
        return ""

    @property
    def node_times(self) -> NodeTimes:
        return TIMES

    def _client(self, prefix: Sequence[str] = (), timeout_s: float = 30) -> SlurmClient:
        env = {"PATH": PATH, "SLURM_CONF": str(self.folder.slurm_conf)}
        return SlurmClient(self.runner, env, prefix=prefix, timeout_s=timeout_s)
