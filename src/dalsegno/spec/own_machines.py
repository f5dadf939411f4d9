"""Settings of the targets that use machines you have: `local:` (this one) and `ssh:` (hosts you can reach)."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from dalsegno.spec.names import UserName
from dalsegno.spec.patterns import matching
from dalsegno.spec.section import Section, fault, show

# No leading dash: ssh would read an option.
_ADDRESS = r"[A-Za-z0-9_:][A-Za-z0-9_.:-]{0,252}(\[[0-9,-]{1,200}\][A-Za-z0-9_.:-]{0,100})?"
_HOST_KEY = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}(\[[0-9,-]{1,200}\])?"
_FILE = r"[A-Za-z0-9_./~][A-Za-z0-9_./@%+=~-]{0,254}"
_JUMP = r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}(:\d{1,5})?"
_LARGEST, _SMALLEST = 8, 29  # prefix lengths


def _subnet(value: str) -> str:
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError:
        raise fault(f"is not a subnet: {show(value)}", "write `10.77.0.0/16`") from None
    if not _LARGEST <= network.prefixlen <= _SMALLEST:
        raise fault(f"must be between /{_LARGEST} and /{_SMALLEST}, not {show(value)}", "write `10.77.0.0/16`")
    return str(network)


def _address_only(value: Any) -> Any:
    """`train-1: 10.0.0.1` is short for `train-1: {address: 10.0.0.1}`."""
    return {"address": value} if isinstance(value, str) else value


Address = Annotated[str, matching(_ADDRESS, "write a host name or an address")]
HostKey = Annotated[str, matching(_HOST_KEY, "write a node's name: `train-1`, `train-[1-4]`")]
File = Annotated[str, matching(_FILE, "write a path, such as `~/.ssh/id_ed25519`")]
Jump = Annotated[str, matching(_JUMP, "write `user@bastion.example.com`")]
Port = Annotated[int, Field(ge=1, le=65535)]


class Local(Section):
    """Real Slurm on this machine."""

    hosts: Literal["auto", "virtual", "loopback"] = Field(
        default="auto",
        description="virtual: a namespace per node (root); loopback: processes on ports; auto: the best we may.",
    )
    gpus: Literal["auto", "simulated", "real"] = Field(
        default="auto", description="real: the machine's own; simulated: device files; auto: real where there are any."
    )
    subnet: Annotated[str, AfterValidator(_subnet)] = Field(
        default="", description="Subnet of the virtual hosts; left out, a free one is chosen."
    )


class Host(Section):
    """How one machine is reached, where it differs from the rest."""

    address: Address = Field(default="", description="Host name or address; else the node's name.")
    user: UserName | None = Field(default=None, description="User to log in as.")
    port: Port | None = Field(default=None, description="Port of its sshd.")
    key: File | None = Field(default=None, description="Private key file.")
    jump: Jump | None = Field(default=None, description="Host to go through.")


class Ssh(Section):
    """Machines that are there already and are reached over SSH."""

    hosts: dict[HostKey, Annotated[Host, BeforeValidator(_address_only, json_schema_input_type=str | Host)]] = Field(
        default={}, description="Node name to address: {head: 10.0.0.1, 'train-[1-4]': '10.0.0.[11-14]'}."
    )
    user: UserName = Field(default="root", description="User to log in as; needs sudo if it is not root.")
    port: Port = Field(default=22, description="Port of sshd.")
    key: File | None = Field(default=None, description="Private key file; else ssh's own choice.")
    jump: Jump | None = Field(default=None, description="Host to go through: user@bastion.")
