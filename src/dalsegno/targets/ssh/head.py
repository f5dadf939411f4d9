"""The target on the head of a cluster on ssh hosts. The controller, the observer and people on the head use it.

The cluster is changed only from the operator's machine. On the head, `up` and `down` refuse and say where to run them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

from dalsegno.errors import NotThere
from dalsegno.hostlist import closest
from dalsegno.observe.monitor_layout import MonitorLayout
from dalsegno.setup.applier import answer
from dalsegno.spec.facts import Cluster, SshHost
from dalsegno.system.processes import Runner
from dalsegno.targets.base import ClusterPhase, ClusterStatus, DaemonStatus, NodeTimes
from dalsegno.targets.folder import read_applied, read_facts
from dalsegno.targets.sides import NO_SLURMCTLD, MonitoredHead, applied_cluster
from dalsegno.targets.ssh.folder import PowerCommands, SshFolder, read_ssh_state
from dalsegno.targets.ssh.monitoring import monitor_layout
from dalsegno.targets.ssh.repair import REBOOT, RESET, repair_argv
from dalsegno.targets.ssh.services import PATH
from dalsegno.targets.ssh.shell import ssh_argv
from dalsegno.targets.ssh.status import gone, phase_of, read_status

POWER_S = 120.0
TIMES = NodeTimes(boot_s=900.0, gone_s=30.0)  # real machines take minutes to boot


class HeadTarget(MonitoredHead):
    """The target on the head, for the cluster of the state folder there."""

    kind = "ssh"
    times = TIMES
    folder: SshFolder

    def __init__(self, folder: Path, runner: Runner | None = None) -> None:
        super().__init__(folder, runner)
        self.folder = SshFolder(folder)

    def monitor_layout(self) -> MonitorLayout:
        return monitor_layout(applied_cluster(self.folder), self.folder)

    def operator(self) -> str:
        state = read_ssh_state(self.folder)
        return state.operator if state else ""

    def status(self) -> ClusterStatus:
        state = read_ssh_state(self.folder)
        if state is None:
            return gone(self.folder)
        slurm = self.slurm_client(timeout_s=5.0) if self.slurm_runs() else None
        problems = [] if slurm else [NO_SLURMCTLD]
        return read_status(state, self.folder.name, read_applied(self.folder), slurm, self._daemons(), problems)

    def _daemons(self) -> list[DaemonStatus]:
        """Return the daemons of the head; none if the caller is not root, because only root can see them.

        The daemons of nodes are known from Slurm and the controller.
        """
        if os.geteuid() != 0:
            return []
        services = answer({"mode": "status"}, BytesIO())["services"]
        host = self.host_name()
        return [DaemonStatus(host, name, bool(fact["running"])) for name, fact in services.items()]

    def host_name(self) -> str:
        state = read_ssh_state(self.folder)
        return state.head if state else super().host_name()

    def recorded_phase(self, applied: Cluster | None) -> ClusterPhase:
        state = read_ssh_state(self.folder)
        phase = phase_of(state, applied, ()) if state else ClusterPhase.GONE
        return ClusterPhase.STOPPED if phase is ClusterPhase.UP and not self.slurm_runs() else phase

    def slurmctld_address(self) -> str:
        applied = read_applied(self.folder)
        head = applied.ssh.host(applied.head) if applied else None
        return head.address if head else "127.0.0.1"

    def ssh_to(self, host: str, command: Sequence[str], *, terminal: bool) -> list[str]:
        return ssh_argv(self._host(host), command, terminal=terminal)

    def _host(self, name: str) -> SshHost:
        applied = read_applied(self.folder)
        found = applied.ssh.host(name) if applied else None
        if found is None:
            known = applied.ssh.names if applied else ()
            close = closest(name, known)
            hint = f"did you mean `{close}`? " if close else ""
            raise NotThere(f"there is no host `{name}`", hint=f"{hint}hosts: {', '.join(known[:12])}")
        return SshHost(found.name, found.address, "", found.port)  # the operator's keys are not on the head

    def reset_gpus(self, node: str) -> None:
        self._order(self._node(node), RESET)

    def reboot(self, node: str) -> None:
        """Reboot a node with the command in the cluster file, or over ssh if there is none.

        The command in the cluster file works even if the node hangs.
        """
        host = self._node(node)
        power = (read_facts(PowerCommands, self.folder.power) or PowerCommands()).nodes.get(node)
        if not power:
            self._order(host, REBOOT)
            return
        hint = "check `ssh.power_cycle` in the cluster file; it runs on the head, as root"
        self.runner.run(power, env={"PATH": PATH}, timeout_s=POWER_S).checked(hint=hint)

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
