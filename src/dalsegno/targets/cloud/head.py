"""The head node's side of a cluster whose machines a platform owns: what the controller, the observer and people use.

The cluster is changed from the operator's machine only: `up` and `down` refuse here, and say where to run them.
"""

from __future__ import annotations

import os
import pwd
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from dalsegno.errors import DalsegnoError, NotThere, TargetError
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


class ManagedHead:
    """The cluster in the state folder of its head node. A platform's own class adds how machines are repaired."""

    def __init__(
        self, folder: Path, kind: str, slurmctld_port: int, times: NodeTimes, runner: Runner | None = None
    ) -> None:
        self.folder, self.kind, self.node_times = ClusterFolder(folder), kind, times
        self._port, self.runner = slurmctld_port, runner or LocalRunner()
        self.slurm = self._client()

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

    # Report
    def status(self) -> ClusterStatus:
        """Return the status from Slurm. Only the operator's machine calls the platform's API."""
        if not self.slurm_runs():
            return self._silent("slurmctld does not run")
        slurm = self._client(timeout_s=5.0)
        try:
            nodes = tuple(_node(each) for each in slurm.nodes())
            running = tuple(job_status(job) for job in slurm.queue().jobs)
        except DalsegnoError as error:
            return self._silent(f"slurmctld does not answer: {error.what.splitlines()[-1].strip()}")
        return ClusterStatus(self.folder.name, self.kind, ClusterPhase.UP, nodes, (), running)

    def _silent(self, problem: str) -> ClusterStatus:
        return ClusterStatus(self.folder.name, self.kind, ClusterPhase.DEGRADED, jobs=None, problems=(problem,))

    def summary(self) -> ClusterSummary:
        try:
            applied = read_applied(self.folder)
        except DalsegnoError:
            return ClusterSummary(self.kind, ClusterPhase.DAMAGED, 0)
        phase = ClusterPhase.UP if self.slurm_runs() else ClusterPhase.STOPPED
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
            with socket.create_connection((socket.gethostname(), self._port), timeout=1.0):
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
            return self._shell_as(user, inner, env)
        return ShellEntry(inner or [env.get("SHELL") or "/bin/bash"], {**env, **self.user_env(env)})

    def _shell_as(self, user: str, command: Sequence[str], env: Mapping[str, str]) -> ShellEntry:
        """Return a shell of another user, who gets neither the caller's terminal nor the caller's environment."""
        try:
            person = pwd.getpwnam(user)
        except KeyError:
            raise NotThere(f"there is no user `{user}` on this machine", hint="`getent passwd` lists users") from None
        kept = {name: value for name, value in env.items() if name in ("TERM", "LANG", "TZ") or name.startswith("LC_")}
        own = {"USER": user, "LOGNAME": user, "HOME": person.pw_dir, "SHELL": person.pw_shell}
        argv = ["runuser", "-u", user, "--", *(command or [person.pw_shell or "/bin/sh"])]
        return ShellEntry(argv, {**kept, **own, **self.user_env({"PATH": PATH})}, person.pw_uid)

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        # Machines of a cluster have the key of the login user's home, which they share.
        return ShellEntry(["ssh", "--", node, *([shlex.join(command)] if command else [])], dict(env))

    def job_images(self) -> str:
        return ""

    def _client(self, prefix: Sequence[str] = (), timeout_s: float = 30) -> SlurmClient:
        env = {"PATH": PATH, "SLURM_CONF": str(self.folder.slurm_conf), "HOME": os.environ.get("HOME", "/")}
        return SlurmClient(self.runner, env, prefix=prefix, timeout_s=timeout_s)


def _node(info: NodeInfo) -> NodeStatus:
    return NodeStatus(
        info.name, info.word, info.reason, info.partitions, info.gpus, info.gpus_used, info.gpu_type, info.address,
        reason_user=info.reason_user,
    )  # fmt: skip
