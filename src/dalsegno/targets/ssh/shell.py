"""Commands on the cluster's machines: through ssh's own client for people, and as a runner of Slurm's commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.spec.facts import SshHost
from dalsegno.system.processes import Completed
from dalsegno.system.ssh import HostRunner, SshAddress, client_argv

ANSWER_S = 60.0


def address_of(host: SshHost) -> SshAddress:
    return SshAddress(host.name, host.address, host.user, host.port, host.key, host.jump)


def ssh_argv(host: SshHost, command: Sequence[str], *, terminal: bool, known_hosts: str = "") -> list[str]:
    """Return the command line of ssh that opens a shell on a host, or runs one command there."""
    file = Path(known_hosts) if known_hosts else None
    return client_argv(address_of(host), command, known_hosts=file, terminal=terminal)


def as_root(host: SshHost, command: Sequence[str]) -> list[str]:
    """Return a command that runs as root on the host, through sudo if the login is not root."""
    return list(command) if host.user == "root" else ["sudo", "--", *command]


@dataclass(frozen=True)
class HeadRunner:
    """Runs commands on one host as root. The environment of the caller's machine is not used there."""

    hosts: HostRunner
    host: str

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout_s: float | None = None,
    ) -> Completed:
        pairs = [f"{name}={value}" for name, value in (env or {}).items()]
        full = ["env", *pairs, *argv]
        return self.hosts.run(self.host, full, stdin=(stdin or "").encode(), root=True, timeout_s=timeout_s or ANSWER_S)
