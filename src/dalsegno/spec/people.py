"""Sections of the cluster file: accounts, users and storage."""

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
        raise fault(f"cannot be `{value}`", "this is a system user; choose another name")
    return value


SshKey = Annotated[str, AfterValidator(_ssh_key)]
Shares = Annotated[int, Field(ge=0, le=2**31 - 1)]


class AccountSpec(Section):
    """A Slurm account: a team or project whose usage is counted together."""

    name: AccountName = Field(description="Name of the account, in lower case.")
    parent: AccountName = Field(default="root", description="Parent account.")
    fair_share: Shares = Field(default=1, description="Fair-share shares, relative to accounts with the same parent.")
    qos: Accounts = Field(default=[], description="QOS that its users may use.")
    group_tres: dict[TresName, Amount] = Field(
        default={}, description="Limit on the resources of all its running jobs (GrpTRES)."
    )
    description: Label = Field(default="", description="Description of the account.")


class UserSpec(Section):
    """A user of the cluster."""

    name: Annotated[UserName, AfterValidator(_not_system)] = Field(description="Unix user name.")
    uid: int | None = Field(default=None, ge=1000, le=2**31 - 1, description="Unix user id. Default: a free one.")
    full_name: Label = Field(default="", description="Full name.")
    groups: Groups = Field(default=[], description="Further Unix groups.")
    ssh_keys: list[SshKey] = Field(default=[], description="SSH public keys for login.")
    accounts: Accounts = Field(default=[], description="Slurm accounts.")
    default_account: AccountName = Field(default="", description="Account of jobs that name none. Default: the first.")
    fair_share: Shares = Field(default=1, description="Fair-share shares within the account.")
    qos: Accounts = Field(default=[], description="QOS that the user may use.")
    default_qos: AccountName = Field(default="", description="QOS of jobs that name none.")
    admin: bool = Field(default=False, description="May change the cluster (Slurm's AdminLevel=Admin, sudo).")


Source = Annotated[
    str,
    matching(r"[A-Za-z0-9/][A-Za-z0-9_./:@-]{0,254}", "write a folder, `server:/export`, or the file system's id"),
]
Options = Annotated[str, matching(r"[A-Za-z0-9_=,.:/-]{0,254}", "write them as for mount: `noatime,nconnect=16`")]
StorageType = Literal["folder", "nfs", "lustre", "openzfs", "efs", "ebs", "fss"]


class StorageSpec(Section):
    """A file system that is mounted on all nodes."""

    name: PlainName = Field(description="Name of the file system.")
    mount: AbsolutePath = Field(description="Mount point on every node: /fsx.")
    type: StorageType = Field(default="folder", description="folder, nfs, lustre, openzfs, efs, ebs or fss (OCI).")
    size: SizeMiB | None = Field(default=None, description="Size of a new file system: 1200G.")
    source: Source = Field(
        default="", description="Existing file system: a local folder, server:/export, or fs-0123456789abcdef0."
    )
    options: Options = Field(default="", description="Mount options.")
    throughput: int | None = Field(default=None, ge=1, le=10000, description="MB/s per TiB, where the cloud offers it.")
    home: bool = Field(default=False, description="Holds the users' home folders.")
