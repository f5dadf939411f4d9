"""Accounts and users, as written in the cluster file."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from dalsegno.spec.names import AccountName, Accounts, Groups, Label, UserName
from dalsegno.spec.section import Section, fault, show
from dalsegno.spec.slurm import Amount, TresName

_SSH_KEY = re.compile(
    r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp\d{3}|sk-[a-z0-9@.-]{1,60})"
    r" [A-Za-z0-9+/=]{20,4000}( [^\x00-\x1f\x7f]{0,200})?"
)
_SYSTEM_USERS = {"root", "daemon", "nobody", "slurm", "munge", "mysql", "dalsegno"}


def _ssh_key(value: str) -> str:
    if not _SSH_KEY.fullmatch(value.strip()):
        raise fault(f"is not an SSH public key: {show(value)}", "paste the one line of `~/.ssh/id_ed25519.pub`")
    return value.strip()


def _not_system(value: str) -> str:
    if value in _SYSTEM_USERS:
        raise fault(f"cannot be `{value}`", "that user belongs to the system; name people here")
    return value


SshKey = Annotated[str, AfterValidator(_ssh_key)]
Shares = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Account(Section):
    """A Slurm account: a team or project whose use is counted together."""

    name: AccountName = Field(description="Name of the account, in lower case as Slurm keeps it.")
    parent: AccountName = Field(default="root", description="The account above it.")
    fair_share: Shares = Field(default=1, description="Shares of the machine, against its sisters.")
    qos: Accounts = Field(default=[], description="QOS its users may use.")
    group_tres: dict[TresName, Amount] = Field(default={}, description="Most that all its jobs may hold (GrpTRES).")
    description: Label = Field(default="", description="For people.")


class User(Section):
    """Someone who uses the cluster."""

    name: Annotated[UserName, AfterValidator(_not_system)] = Field(description="Unix name.")
    uid: int | None = Field(default=None, ge=1000, le=2**31 - 1, description="Unix user id; chosen where left out.")
    full_name: Label = Field(default="", description="For people.")
    groups: Groups = Field(default=[], description="Further Unix groups.")
    ssh_keys: list[SshKey] = Field(default=[], description="Public keys that may log in.")
    accounts: Accounts = Field(default=[], description="Slurm accounts.")
    default_account: AccountName = Field(default="", description="Account of a job that names none; else the first.")
    fair_share: Shares = Field(default=1, description="Shares within the account.")
    qos: Accounts = Field(default=[], description="QOS this user may use.")
    default_qos: AccountName = Field(default="", description="QOS of a job that names none.")
    admin: bool = Field(default=False, description="May change the cluster (Slurm's AdminLevel=Admin, sudo).")
