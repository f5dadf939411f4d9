"""Run commands on the cluster's machines: with the ssh client for people, and with a runner for Slurm's commands."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dalsegno.programs import launcher
from dalsegno.spec.facts import SshAccess, SshHost
from dalsegno.system.processes import Completed
from dalsegno.system.ssh import HostRunner, SshAddress, client_argv
from dalsegno.system.sudo_session import session_argv, sudo_argv
from dalsegno.targets.sides import at_terminal

ANSWER_S = 60.0


def address_of(host: SshHost) -> SshAddress:
    return SshAddress(host.name, host.address, host.user, host.port, host.key, host.jump)


def ssh_argv(host: SshHost, command: Sequence[str], *, terminal: bool, known_hosts: str = "") -> list[str]:
    """Return the command line of ssh that opens a shell on a host, or runs one command there."""
    file = Path(known_hosts) if known_hosts else None
    return client_argv(address_of(host), command, known_hosts=file, terminal=terminal)


def root_argv(host: SshHost, command: Sequence[str], access: SshAccess, *, terminal: bool) -> list[str]:
    """Return the command line that runs a command as root on a host, through sudo if the login is not root.

    With a password file and no terminal, a helper program starts ssh and answers sudo. Otherwise sudo asks the person
    at the terminal. No program may answer a question that appears on a terminal, because other users of the host may be
    able to write to that terminal and fake the question.
    """
    if host.user == "root":
        return ssh_argv(host, command, terminal=terminal, known_hosts=access.known_hosts)
    if not access.sudo_password_file or (terminal and at_terminal()):
        return ssh_argv(host, ["sudo", "--", *command], terminal=terminal, known_hosts=access.known_hosts)
    mark = f"dalsegno-{secrets.token_hex(8)}"
    ssh = ssh_argv(host, sudo_argv(command, mark), terminal=False, known_hosts=access.known_hosts)
    return [*launcher(), *session_argv(access.sudo_password_file, mark, ssh)]


@dataclass(frozen=True)
class HeadRunner:
    """Runs commands on one host as root. The commands do not get the environment of this machine."""

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
