"""Addresses and settings for hosts over SSH, and the faults that can occur."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from dalsegno.errors import TargetError

AT_ONCE = 16
CONNECT_TIMEOUT_S = 20.0  # includes the login, because sshd may wait some seconds for DNS
KEEPALIVE_S = 5.0
SILENT_INTERVALS = 3  # a host that is silent for this many intervals is disconnected
# After the login, sshd answers nothing until PAM has opened the session. Where systemd starts a manager for the user,
# this takes many seconds on a busy host.
FIRST_SILENT_INTERVALS = 18


@dataclass(frozen=True)
class SshAddress:
    """The ssh settings of one host. Empty fields are taken from the user's own ssh configuration."""

    name: str
    address: str
    user: str = ""
    port: int | None = None
    key: str = ""
    jump: str = ""


@dataclass(frozen=True)
class SshSettings:
    """The settings of all connections. `known_hosts` replaces the files of the user's ssh configuration."""

    limit: int = AT_ONCE
    known_hosts: Path | None = None
    sudo_password: str = ""
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    keepalive_s: float = KEEPALIVE_S

    def __repr__(self) -> str:
        return "SshSettings(…)"  # hides the password from logs


class SshFault(Enum):
    """The reasons why a host could not be reached, or did not run a command."""

    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    LOGIN_REFUSED = "login refused"
    HOST_KEY_UNKNOWN = "host key unknown"
    HOST_KEY_CHANGED = "host key changed"
    NO_SUDO = "no sudo"
    CUT = "connection lost"
    TOO_MUCH_OUTPUT = "too much output"
    SETTINGS = "settings"
    PROTOCOL = "protocol"


class SshError(TargetError):
    """A host could not be reached, or a command could not be run on it. Code depends on `fault`, never on the text.

    `output` contains the last lines that the host sent before the fault.
    """

    def __init__(self, host: str, fault: SshFault, what: str, *, hint: str, output: str = "") -> None:
        super().__init__(f"{host}: {what}", hint=hint)
        self.host = host
        self.fault = fault
        self.output = output
