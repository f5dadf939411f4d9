"""Accounts and users, as written in the cluster file."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from dalsegno.spec.names import AbsolutePath, AccountName, Accounts, Groups, Label, PlainName, UserName, matching
from dalsegno.spec.quantities import SizeMiB
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


class AccountSpec(Section):
    """A Slurm account: a team or project whose use is counted together."""

    name: AccountName = Field(description="Name of the account, in lower case as Slurm keeps it.")
    parent: AccountName = Field(default="root", description="The account above it.")
    fair_share: Shares = Field(default=1, description="Shares of the machine, against its sisters.")
    qos: Accounts = Field(default=[], description="QOS its users may use.")
    group_tres: dict[TresName, Amount] = Field(default={}, description="Most that all its jobs may hold (GrpTRES).")
    description: Label = Field(default="", description="For people.")


class UserSpec(Section):
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


# ---- Shared storage, as written in the cluster file.


Source = Annotated[
    str,
    matching(r"[A-Za-z0-9/][A-Za-z0-9_./:@-]{0,254}", "write a folder, `server:/export`, or the file system's id"),
]
Options = Annotated[str, matching(r"[A-Za-z0-9_=,.:/-]{0,254}", "write them as for mount: `noatime,nconnect=16`")]
StorageType = Literal["folder", "nfs", "lustre", "openzfs", "efs", "ebs", "fss"]


class StorageSpec(Section):
    """A file system that all nodes see."""

    name: PlainName = Field(description="Name of the file system.")
    mount: AbsolutePath = Field(description="Where every node finds it: /fsx.")
    type: StorageType = Field(default="folder", description="folder, nfs, lustre, openzfs, efs, ebs or fss (OCI).")
    size: SizeMiB | None = Field(default=None, description="Size of one to be made: 1200G.")
    source: Source = Field(
        default="", description="One that exists: a folder of this machine, server:/export, or fs-0123456789abcdef0."
    )
    options: Options = Field(default="", description="Mount options.")
    throughput: int | None = Field(default=None, ge=1, le=10000, description="MB/s per TiB, where the cloud sells it.")
    home: bool = Field(default=False, description="People's home folders live here.")
