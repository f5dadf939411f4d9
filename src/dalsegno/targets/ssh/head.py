"""The head's side of a cluster on ssh hosts: what the controller, the observer and people on the head use.

The cluster is changed from the operator's machine only: `up` and `down` refuse here, and say where to run them.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import NoReturn

from dalsegno.errors import DalsegnoError, NotThere, TargetError
from dalsegno.hostlist import closest
from dalsegno.observe.monitor_layout import MonitorLayout
from dalsegno.setup.applier import answer
from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster, SshHost
from dalsegno.system.processes import LocalRunner, Runner
from dalsegno.targets.base import (
    ClusterPhase,
    ClusterStatus,
    ClusterSummary,
    DaemonLog,
    DaemonStatus,
    NodeTimes,
    Plan,
    Removal,
    RootUse,
    Say,
    ShellEntry,
)
from dalsegno.targets.folder import read_applied
from dalsegno.targets.ssh.folder import SshFolder, read_ssh_state
from dalsegno.targets.ssh.monitoring import monitor_layout
from dalsegno.targets.ssh.repair import REBOOT, RESET, repair_argv
from dalsegno.targets.ssh.services import LOGS, PATH
from dalsegno.targets.ssh.shell import ssh_argv
from dalsegno.targets.ssh.status import gone, phase_of, read_status

SLURMCTLD_PORT = 6817
POWER_S = 120.0
TIMES = NodeTimes(boot_s=900.0, gone_s=30.0)  # real machines take minutes to boot


class HeadTarget:
    """The cluster in the state folder of its head."""

    def __init__(self, folder: Path, runner: Runner | None = None) -> None:
        self.folder = SshFolder(folder)
        self.runner = runner or LocalRunner()
        self.slurm = self._client()

    @property
    def kind(self) -> str:
        return "ssh"

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

    def switch_monitor(self, on: bool) -> Plan:
        self._refuse("changed")

    def has_monitor(self) -> bool:
        applied = read_applied(self.folder)
        return applied is not None and applied.monitoring.prometheus

    def monitor_layout(self) -> MonitorLayout:
        applied = read_applied(self.folder)
        if applied is None:
            raise TargetError(f"there is no complete cluster {self.folder.name}", hint="run `dalsegno up` again")
        return monitor_layout(applied, self.folder)

    def _refuse(self, what: str) -> NoReturn:
        state = read_ssh_state(self.folder)
        where = f" by {state.operator}" if state and state.operator else ""
        raise TargetError(
            f"{self.folder.name} was created from another machine{where}, and is {what} from there",
            hint="run the command on that machine",
        )

    def status(self) -> ClusterStatus:
        state = read_ssh_state(self.folder)
        if state is None:
            return gone(self.folder)
        slurm = self._client(timeout_s=5.0) if self.slurm_runs() else None
        problems = [] if slurm else ["slurmctld does not run"]
        return read_status(state, self.folder.name, read_applied(self.folder), slurm, self._daemons(), problems)

    def _daemons(self) -> list[DaemonStatus]:
        """Return the daemons of the head. Only root can see them; those of nodes are known to Slurm and the
        controller."""
        if os.geteuid() != 0:
            return []
        state = read_ssh_state(self.folder)
        services = answer({"mode": "status"}, BytesIO())["services"]
        host = state.head if state else socket.gethostname()
        return [DaemonStatus(host, name, bool(fact["running"])) for name, fact in services.items()]

    def summary(self) -> ClusterSummary:
        try:
            state, applied = read_ssh_state(self.folder), read_applied(self.folder)
        except DalsegnoError:
            return ClusterSummary("ssh", ClusterPhase.DAMAGED, 0)
        phase = phase_of(state, applied, ()) if state else ClusterPhase.GONE
        if phase is ClusterPhase.UP and not self.slurm_runs():
            phase = ClusterPhase.STOPPED
        return ClusterSummary("ssh", phase, len(applied.nodes) if applied else 0)

    def daemon_logs(self) -> list[DaemonLog]:
        state = read_ssh_state(self.folder)
        host = state.head if state else socket.gethostname()
        return [DaemonLog(host, path.stem, path) for path in sorted(Path(LOGS).glob("*.log"))]

    def owner(self) -> int | None:
        try:
            return self.folder.root.stat().st_uid
        except OSError:
            return None

    def slurm_as(self, user: str) -> SlurmClient:
        return self._client(["runuser", "-u", user, "--"])

    def slurm_runs(self) -> bool:
        applied = read_applied(self.folder)
        head = applied.ssh.host(applied.head) if applied else None
        try:
            with socket.create_connection((head.address if head else "127.0.0.1", SLURMCTLD_PORT), timeout=1.0):
                return True
        except OSError:
            return False

    @property
    def controller_socket(self) -> Path:
        return self.folder.controller_socket

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        return {
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
            return ShellEntry(ssh_argv(self._host(host), inner, terminal=not command), dict(env))
        if user:
            return self._shell_as(user, inner, env)
        return ShellEntry(inner or [env.get("SHELL") or "/bin/bash"], {**env, **self.user_env(env)})

    def _shell_as(self, user: str, command: Sequence[str], env: Mapping[str, str]) -> ShellEntry:
        """Return a shell of another user, who gets neither the caller's terminal nor the caller's environment."""
        try:
            person = pwd.getpwnam(user)
        except KeyError:
            raise NotThere(f"there is no user `{user}` on this machine", hint="`users:` of the cluster file") from None
        kept = {name: value for name, value in env.items() if name in ("TERM", "LANG", "TZ") or name.startswith("LC_")}
        own = {"PATH": PATH, "USER": user, "LOGNAME": user, "HOME": person.pw_dir, "SHELL": person.pw_shell}
        argv = ["runuser", "-u", user, "--", *(command or [person.pw_shell or "/bin/sh"])]
        return ShellEntry(argv, {**kept, **own, **self.user_env(env)}, person.pw_uid)

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        return ShellEntry(ssh_argv(self._host(node), command, terminal=False), dict(env))

    def _host(self, name: str) -> SshHost:
        applied = read_applied(self.folder)
        found = applied.ssh.host(name) if applied else None
        if found is None:
            known = applied.ssh.names if applied else ()
            close = closest(name, known)
            hint = f"did you mean `{close}`? " if close else ""
            raise NotThere(f"there is no host `{name}`", hint=f"{hint}hosts: {', '.join(known[:12])}")
        return SshHost(found.name, found.address, "", found.port)  # keys of the operator are not here

    def job_images(self) -> str:
        applied = read_applied(self.folder)
        return applied.containers.folder if applied and applied.containers.enabled else ""

    @property
    def node_times(self) -> NodeTimes:
        return TIMES

    def reset_gpus(self, node: str) -> None:
        self._order(self._node(node), RESET)

    def reboot(self, node: str) -> None:
        """Reboot a node: with the command of the cluster file, which also helps if the node hangs, or else over ssh."""
        host = self._node(node)
        if not host.power_cycle:
            self._order(host, REBOOT)
            return
        hint = "check `ssh.power_cycle` in the cluster file; it runs on the head, as root"
        self.runner.run(host.power_cycle, env={"PATH": PATH}, timeout_s=POWER_S).checked(hint=hint)

    def _order(self, host: SshHost, order: str) -> None:
        hint = "sshd there must let root log in with a key; `ssh.power_cycle` in the file reboots a machine that hangs"
        argv = repair_argv(host, self.folder, order)
        self.runner.run(argv, env={"PATH": PATH}, timeout_s=POWER_S).checked(hint=hint)

    def machines(self) -> Mapping[str, str]:
        applied = read_applied(self.folder)
        hosts = [applied.ssh.host(node.name) for node in applied.nodes] if applied else []
        return {host.name: f"the machine of {host.name} at {host.address}" for host in hosts if host is not None}

    def _node(self, name: str) -> SshHost:
        applied = read_applied(self.folder)
        host = applied.ssh.host(name) if applied else None
        if host is None:
            raise NotThere(f"there is no node `{name}`", hint="`dalsegno status` shows the nodes")
        return host

    def _client(self, prefix: Sequence[str] = (), timeout_s: float = 30) -> SlurmClient:
        env = {"PATH": PATH, "SLURM_CONF": str(self.folder.slurm_conf)}
        return SlurmClient(self.runner, env, prefix=prefix, timeout_s=timeout_s)
