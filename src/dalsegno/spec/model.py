"""The model of the cluster file: machines, partitions, accounts, users, storage, and the file as a whole.

The sections `slurm` and `health` and the targets' sections are in separate modules.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, WithJsonSchema

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.spec.health import ContainersSpec, HealthSpec, Modules
from dalsegno.spec.monitoring import MonitoringSpec
from dalsegno.spec.oci import Oci
from dalsegno.spec.section import Section, fault, show
from dalsegno.spec.slurm import Amount, PreemptMode, RawSettings, ReservationSpec, SlurmSpec, TresName
from dalsegno.spec.targets import DEFAULT_TARGET, TARGETS, Existing, HyperPod, LocalSpec, ParallelCluster, Ssh, Target
from dalsegno.spec.values import (
    AbsolutePath,
    AccountName,
    Accounts,
    ClusterName,
    Features,
    GpuType,
    Groups,
    HostNames,
    InstanceName,
    Label,
    Limit,
    NodeCount,
    PartitionName,
    PartitionNames,
    PlainName,
    SizeMiB,
    SpareCount,
    UserName,
    matching,
)

_OVERSUBSCRIBE = re.compile(r"NO|EXCLUSIVE|(YES|FORCE)(:[1-9]\d{0,3})?")
_PRIORITY_MAX = 65533
_SSH_KEY = re.compile(
    r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp\d{3}|sk-[a-z0-9@.-]{1,60})"
    r" [A-Za-z0-9+/=]{20,4000}( [^\x00-\x1f\x7f]{0,200})?"
)
_SYSTEM_USERS = {"root", "daemon", "nobody", "slurm", "munge", "mysql", "dalsegno"}


def _oversubscribe(value: object) -> str:
    text = ("YES" if value else "NO") if isinstance(value, bool) else value
    if isinstance(text, str) and _OVERSUBSCRIBE.fullmatch(text.upper()):
        return text.upper()
    raise fault(f"cannot be {show(value)}", "write `no`, `exclusive`, `yes`, `yes:4` or `force:2`")


OverSubscribe = Annotated[str, PlainValidator(_oversubscribe), WithJsonSchema({"type": ["string", "boolean"]})]


class MachineSpec(Section):
    """The size of a machine: an instance type from the catalog, or plain sizes."""

    instance: InstanceName = Field(default="", description="Instance type, such as p5.48xlarge or BM.GPU.H100.8.")
    cpus: int | None = Field(default=None, ge=1, le=4096, description="CPUs of the machine, as Slurm counts them.")
    memory: SizeMiB | None = Field(default=None, description="Memory of the machine, with its unit: 64G.")


class Head(MachineSpec):
    """The head node, which runs slurmctld and Dal Segno's controller."""

    name: PartitionName = Field(default="head", description="Host name of the head node.")


class Login(MachineSpec):
    """The login nodes."""

    count: int = Field(
        default=0, ge=0, le=64, description="Number of login nodes. With 0, users log in to the head node."
    )
    names: HostNames = Field(default=[], description="Host names of existing login nodes: login[1-2].")


class PartitionSpec(MachineSpec):
    """A Slurm partition and the machines in it."""

    name: PartitionName = Field(description="Name of the partition. Its nodes are named <name>-1, <name>-2 …")
    nodes: NodeCount | None = Field(default=None, description="Number of nodes, or their names: gpu[001-064].")
    nodes_from: PartitionNames = Field(
        default=[], description="Partitions whose nodes this one shares; with `nodes: K`, only the first K nodes."
    )
    spares: SpareCount = Field(default=0, description="Nodes that replace lost ones; out of scheduling until then.")
    gpus: int | None = Field(
        default=None, ge=0, le=256, description="GPUs per node. Default: those of the instance type."
    )
    gpu_type: GpuType = Field(default="", description="GPU type, as in Slurm's gres: h100, a100, l4.")
    default: bool = Field(default=False, description="Partition of jobs that name none. Default: the first partition.")
    time_limit: Limit = Field(default=None, description="Maximum run time of a job (MaxTime).")
    default_time: Limit = Field(default=None, description="Time limit of a job that requests none (DefaultTime).")
    max_nodes: int | None = Field(default=None, ge=1, description="Maximum nodes per job (MaxNodes).")
    min_nodes: int | None = Field(default=None, ge=0, description="Minimum nodes per job (MinNodes).")
    priority: int | None = Field(
        default=None, ge=0, le=_PRIORITY_MAX, description="Sets both `priority_tier` and `priority_job_factor`."
    )
    priority_tier: int | None = Field(
        default=None,
        ge=0,
        le=_PRIORITY_MAX,
        description="Jobs are scheduled before jobs of a lower tier (PriorityTier).",
    )
    priority_job_factor: int | None = Field(
        default=None, ge=0, le=_PRIORITY_MAX, description="Partition factor in a job's priority (PriorityJobFactor)."
    )
    weight: int = Field(
        default=1, ge=1, le=2**31 - 1, description="Nodes with a lower weight are allocated first (Weight)."
    )
    features: Features = Field(default=[], description="Features of the nodes, for `--constraint` (Features).")
    allow_accounts: Accounts = Field(
        default=[], description="Only these accounts may use the partition (AllowAccounts)."
    )
    allow_groups: Groups = Field(default=[], description="Only these Unix groups may use the partition (AllowGroups).")
    allow_qos: Accounts = Field(default=[], description="Only these QOS may use the partition (AllowQos).")
    oversubscribe: OverSubscribe = Field(default="", description="no, exclusive, yes[:N] or force[:N] (OverSubscribe).")
    preempt_mode: PreemptMode = Field(
        default="", description="What happens to preempted jobs of the partition (PreemptMode)."
    )
    hidden: bool = Field(default=False, description="Hide the partition from `sinfo` and `squeue` by default (Hidden).")
    extra: RawSettings = Field(default={}, description="Further settings of the PartitionName line, as in slurm.conf.")


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


def _full_name(value: str) -> str:
    # A colon would start the next field of /etc/passwd; line separators are not printable either.
    if ":" in value or not value.isprintable() or len(value) > 200:
        raise fault(f"cannot be {show(value)}", "write it on one line without `:`, at most 200 letters")
    return value


FullName = Annotated[str, AfterValidator(_full_name)]


class UserSpec(Section):
    """A user of the cluster."""

    name: Annotated[UserName, AfterValidator(_not_system)] = Field(description="Unix user name.")
    uid: int | None = Field(default=None, ge=1000, le=2**31 - 1, description="Unix user id. Default: a free one.")
    full_name: FullName = Field(default="", description="Full name.")
    groups: Groups = Field(default=[], description="Further Unix groups.")
    allow_privileged: Groups = Field(
        default=[], description="Privileged groups, such as `docker`, that `groups` may name. Refused otherwise."
    )
    ssh_keys: list[SshKey] = Field(default=[], description="SSH public keys for login.")
    accounts: Accounts = Field(default=[], description="Slurm accounts.")
    default_account: AccountName = Field(default="", description="Account of jobs that name none. Default: the first.")
    fair_share: Shares = Field(default=1, description="Fair-share shares within the account.")
    qos: Accounts = Field(default=[], description="QOS that the user may use.")
    default_qos: AccountName = Field(default="", description="QOS of jobs that name none.")
    max_gpus: int | None = Field(
        default=None, ge=0, le=10**6, description="GPUs that all running jobs may use, in each account (GrpTRES)."
    )
    admin: bool = Field(default=False, description="May change the cluster (Slurm's AdminLevel=Admin, sudo).")


class GroupSpec(Section):
    """A Unix group of the cluster. Users name the groups that they are in."""

    name: UserName = Field(description="Name of the group.")
    gid: int | None = Field(default=None, ge=1000, le=2**31 - 1, description="Unix group id. Default: a free one.")


LdapBase = Annotated[
    str,
    matching(r"(dc|o|ou)=[A-Za-z0-9_-]{1,63}(,(dc|o|ou)=[A-Za-z0-9_-]{1,63}){0,9}", "write `dc=example,dc=org`"),
]


class DirectorySpec(Section):
    """The directory that holds the accounts."""

    kind: Literal["files", "ldap"] = Field(
        default="files", description="`files`: user and group files on every host; `ldap`: in OpenLDAP on the head too."
    )
    base: LdapBase = Field(default="dc=local", description="Base DN of the LDAP directory.")


Source = Annotated[
    str,
    matching(r"[A-Za-z0-9/][A-Za-z0-9_./:@-]{0,254}", "write a folder, `server:/export`, or the file system's id"),
]
Options = Annotated[str, matching(r"[A-Za-z0-9_=,.:/-]{0,254}", "write them as for mount: `noatime,nconnect=16`")]
StorageType = Literal["folder", "existing", "scratch", "nfs", "lustre", "openzfs", "efs", "ebs", "fss"]


class StorageSpec(Section):
    """A file system that is mounted on all nodes, or a local disk of each node."""

    name: PlainName = Field(description="Name of the file system.")
    mount: AbsolutePath = Field(description="Mount point on every node: /fsx.")
    type: StorageType = Field(
        default="folder",
        description="folder, existing (mounted already), scratch (local to each node), nfs, lustre, openzfs, efs, ebs "
        "or fss (OCI).",
    )
    size: SizeMiB | None = Field(default=None, description="Size of a new file system: 1200G.")
    source: Source = Field(
        default="", description="Existing file system: a local folder, server:/export, or fs-0123456789abcdef0."
    )
    options: Options = Field(default="", description="Mount options.")
    throughput: int | None = Field(default=None, ge=1, le=10000, description="MB/s per TiB, where the cloud offers it.")
    home: bool = Field(default=False, description="Holds the users' home folders.")
    required: bool = Field(
        default=False, description="For scratch: no job starts on a node where its folder cannot be created."
    )
    min_mb_per_s: int | None = Field(
        default=None, ge=1, le=10**6, description="`storage check` fails if a node writes fewer MB/s."
    )
    min_files_per_s: int | None = Field(
        default=None, ge=1, le=10**6, description="`storage check` fails if a node creates and removes fewer files/s."
    )


class ClusterSpec(Section):
    """A cluster as described by its file."""

    name: ClusterName = Field(description="Name of the cluster.")
    target: Target = Field(description="Where the cluster runs.")
    local: LocalSpec | None = Field(default=None, description="Settings of `target: local`.")
    ssh: Ssh | None = Field(default=None, description="Settings of `target: ssh`.")
    parallelcluster: ParallelCluster | None = Field(default=None, description="Settings of `target: parallelcluster`.")
    hyperpod: HyperPod | None = Field(default=None, description="Settings of `target: hyperpod`.")
    oci: Oci | None = Field(default=None, description="Settings of `target: oci`.")
    existing: Existing | None = Field(default=None, description="Settings of `target: existing`.")
    head: Head = Field(default_factory=Head, description="The head node.")
    login: Login = Field(default_factory=Login, description="Login nodes, where users log in.")
    partitions: list[PartitionSpec] = Field(max_length=1000, description="Partitions and their nodes.")
    reservations: list[ReservationSpec] = Field(default=[], max_length=1000, description="Slurm reservations.")
    slurm: SlurmSpec = Field(default_factory=SlurmSpec, description="Slurm policy of the whole cluster.")
    storage: list[StorageSpec] = Field(default=[], max_length=100, description="Shared file systems.")
    containers: ContainersSpec = Field(default_factory=ContainersSpec, description="Container jobs.")
    accounts: list[AccountSpec] = Field(default=[], max_length=10000, description="Slurm accounts.")
    users: list[UserSpec] = Field(default=[], max_length=20000, description="Users of the cluster.")
    groups: list[GroupSpec] = Field(default=[], max_length=10000, description="Unix groups of the cluster.")
    directory: DirectorySpec = Field(default_factory=DirectorySpec, description="Where accounts are kept.")
    health: HealthSpec = Field(default_factory=HealthSpec, description="Health checks and the actions allowed.")
    monitoring: MonitoringSpec = Field(default_factory=MonitoringSpec, description="Metrics, web page, alerts.")
    modules: Modules = Field(default_factory=Modules, description="Environment modules.")


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the cluster file, with a description of every key."""
    schema = ClusterSpec.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Dal Segno cluster file",
        "patternProperties": {"^x-": {"description": "For your own YAML anchors."}},
    }


_STARTERS = Path(__file__).parent / "starters"


def starter(target: str = DEFAULT_TARGET, name: str = "demo") -> str:
    """Return the starter cluster file for a target, which passes `dalsegno validate` unchanged."""
    if target not in TARGETS:
        raise UsageError(f"there is no target `{target}`", hint=did_you_mean(target, TARGETS, ", ".join(TARGETS)))
    text = (_STARTERS / f"{target}.yaml").read_text(encoding="utf-8")
    return text.replace("name: demo", f"name: {name}", 1)
