"""A resolved cluster file as frozen dataclasses, with names looked up and counts expanded.

Renderers, targets and status commands read these dataclasses and never the YAML. The dataclasses do not use pydantic,
so that reading them back from a state folder is fast.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dalsegno.errors import DalsegnoError
from dalsegno.spec.aws_facts import PclusterSettings
from dalsegno.spec.platform_facts import HyperPodFacts, OciFacts

DEFAULT_ACCOUNT = "users"  # the account of users without an account
FOREIGN_TARGET = "existing"  # the target of a cluster that Dal Segno did not create
BUILT_IN_QOS = "normal"  # Slurm creates it, and every user may use it


@dataclass(frozen=True)
class Node:
    """One machine in the cluster. `memory_mib` is the memory that Slurm may allocate.

    For an ssh host without sizes in the file, cpus and memory are 0, and the sizes found on the machine are used.
    """

    name: str
    cpus: int
    memory_mib: int
    gpus: int = 0
    gpu_type: str = ""  # type in Slurm's gres, such as "h100"
    gpu_memory_mib: int = 0
    instance: str = ""  # instance type in the catalog, if the file has one
    features: tuple[str, ...] = ()
    weight: int = 1
    spare: bool = False  # whether the node is kept out of scheduling until a run needs it
    gres: str = "gpu"  # Slurm's name for the devices that `gpus` counts: gpu, or neuron (Trainium)


@dataclass(frozen=True)
class Partition:
    """A Slurm partition and its nodes. None means Slurm's default."""

    name: str
    nodes: tuple[str, ...]  # including spares, which start drained
    default: bool = False
    time_limit_min: int | None = None  # None means INFINITE in Slurm
    default_time_min: int | None = None
    max_nodes: int | None = None
    min_nodes: int | None = None
    priority_tier: int | None = None
    priority_factor: int | None = None  # Slurm's PriorityJobFactor
    oversubscribe: str = ""  # Slurm's OverSubscribe: NO, YES:4, FORCE:2 or EXCLUSIVE; "" if it is not set
    allow_accounts: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    preempt_mode: str = ""  # Slurm's PreemptMode: OFF, CANCEL, REQUEUE or SUSPEND; "" if it is not set
    hidden: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Qos:
    name: str
    priority: int = 0
    preempts: tuple[str, ...] = ()
    preempt_mode: str = ""
    max_time_min: int | None = None
    max_tres_per_user: Mapping[str, int] = field(default_factory=dict)  # limits per user, such as {"gres/gpu": 8}
    max_jobs_per_user: int | None = None
    group_tres: Mapping[str, int] = field(default_factory=dict)
    usage_factor: float | None = None


@dataclass(frozen=True)
class Account:
    name: str
    parent: str = "root"
    fair_share: int = 1
    qos: tuple[str, ...] = ()
    group_tres: Mapping[str, int] = field(default_factory=dict)
    description: str = ""


@dataclass(frozen=True)
class User:
    name: str
    accounts: tuple[str, ...]
    default_account: str
    uid: int | None = None
    fair_share: int = 1
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    admin: bool = False
    groups: tuple[str, ...] = ()  # additional Unix groups
    allow_privileged: tuple[str, ...] = ()  # privileged groups that the user may be in
    ssh_keys: tuple[str, ...] = ()
    full_name: str = ""
    max_gpus: int | None = None  # limit on the GPUs of all the user's running jobs, in each account
    added: bool = False  # whether `dalsegno user add` added the user, who is not in the cluster file


@dataclass(frozen=True)
class Group:
    """A Unix group of the cluster. Its members are the users that name it."""

    name: str
    gid: int | None = None
    added: bool = False  # whether `dalsegno group add` added the group


@dataclass(frozen=True)
class Directory:
    """The place of accounts: the user and group files of every host, and optionally an LDAP server."""

    ldap: bool = False
    base: str = "dc=local"


@dataclass(frozen=True)
class Reservation:
    name: str
    nodes: tuple[str, ...] = ()  # empty if `node_count` is set
    node_count: int | None = None  # number of nodes in `partition` to reserve, which Slurm chooses
    partition: str = ""
    start: str = "now"  # start time in Slurm's format
    duration_min: int | None = None  # None means UNLIMITED in Slurm
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Storage:
    """A file system that is mounted at `mount` on all nodes, or a local disk of each node (`scratch`)."""

    name: str
    mount: str
    type: str = "folder"  # kind: folder, existing, scratch, nfs, lustre, openzfs, efs, ebs or fss
    source: str = ""  # an existing file system; "" creates one (for a folder, in the cluster's state folder)
    size_mib: int | None = None
    options: str = ""
    throughput_mb_per_s_per_tib: int | None = None
    home: bool = False  # whether it holds the users' home folders
    required: bool = False  # scratch: whether a job cannot start without its folder
    min_mb_per_s: int | None = None
    min_files_per_s: int | None = None


@dataclass(frozen=True)
class Switch:
    """A line in topology.conf. A leaf switch names nodes; an inner switch names switches."""

    name: str
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Priority:
    """The multifactor priority. The weights are Slurm's PriorityWeight* settings."""

    age: int = 1000
    fair_share: int = 10000
    job_size: int = 0
    partition: int = 1000
    qos: int = 100000
    tres: Mapping[str, int] = field(default_factory=dict)
    half_life_min: int = 7 * 24 * 60
    usage_reset: str = "NONE"
    calc_period_min: int = 5
    max_age_min: int = 7 * 24 * 60
    favor_small: bool = False


@dataclass(frozen=True)
class Slurm:
    """The cluster-wide Slurm policy."""

    accounting: bool = True
    enforce: tuple[str, ...] = ()  # Slurm's AccountingStorageEnforce
    rest: bool = False  # whether to run slurmrestd
    backup_controller: bool = False
    priority: Priority = field(default_factory=Priority)
    preempt_by: str = ""  # what decides which job preempts another: qos or partition; "" for no preemption
    preempt_mode: str = ""  # what happens to a preempted job: CANCEL, REQUEUE or SUSPEND
    preempt_exempt_time_s: int | None = None
    topology: tuple[Switch, ...] = ()
    qos: tuple[Qos, ...] = ()
    slurmd_timeout_s: int = 300
    extra: Mapping[str, str] = field(default_factory=dict)  # raw slurm.conf settings, which override all others


@dataclass(frozen=True)
class Local:
    """The `local:` block, with the settings for this machine."""

    hosts: str = "auto"  # kind of hosts: virtual (namespaces, needs root), loopback (processes on ports) or auto
    gpus: str = "auto"  # kind of GPUs: simulated, real or auto
    subnet: str = ""  # subnet of the virtual hosts; "" chooses a free one
    cloud: str = "none"  # the cloud whose metadata service is simulated for virtual hosts: none or ec2


@dataclass(frozen=True)
class SshHost:
    """The ssh settings for the machine of a compute node, the head node or a login node."""

    name: str
    address: str
    user: str = "root"
    port: int | None = None  # port of sshd; None leaves the port to ssh's own configuration
    key: str = ""
    jump: str = ""
    # Command on the head node that switches the machine off and on; empty if there is none.
    power_cycle: tuple[str, ...] = ()


@dataclass(frozen=True)
class SshAccess:
    """The `ssh:` block: all machines of the cluster, the head node first, and the settings that they share."""

    hosts: tuple[SshHost, ...] = ()
    known_hosts: str = ""  # file with the host keys; "" means ssh's own files
    sudo_password_file: str = ""
    packages: tuple[str, ...] = ()  # additional packages to install
    slurm_packages: tuple[str, ...] = ()  # packages of Slurm to install instead of the distribution's
    slurm_version: str = ""  # release of Slurm's packages, used if a host does not have the packages yet
    logins_need_job: bool = False  # whether users may log in only to compute nodes on which they have a job

    def host(self, name: str) -> SshHost | None:
        return next((host for host in self.hosts if host.name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)


@dataclass(frozen=True)
class CheckSetting:
    """The settings for one health check in the file."""

    enabled: bool = True
    every_s: int | None = None
    action: str = ""  # strongest action allowed: watch, drain, reset, reboot or replace
    thresholds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Health:
    """The health policy: which checks run, and which actions are allowed."""

    mode: str = "auto"  # whether the controller acts: auto (it acts), observe (it only reports) or off
    max_out: float = 0.25
    per_hour: int = 4
    reboots_per_fault: int = 2
    reboots_per_day: int = 5
    reboots_apart_s: int = 7200
    checks: Mapping[str, CheckSetting] = field(default_factory=dict)  # settings of the checks that the file names
    armed: tuple[str, ...] = ()  # partitions in which recovery acts although the mode is observe


@dataclass(frozen=True)
class Containers:
    """Support for container jobs with Pyxis's options."""

    enabled: bool | None = None  # None means enabled if the required tools are installed
    folder: str = ""  # folder for imported images; "" for the target's default
    images: tuple[str, ...] = ()  # images that `up` imports


@dataclass(frozen=True)
class EmailAlerts:
    """A receiver of alerts by e-mail."""

    to: tuple[str, ...]
    sender: str
    smarthost: str
    user: str = ""
    password_file: str = ""  # file with the password; "" if the server needs no login
    require_tls: bool = True


@dataclass(frozen=True)
class SlackAlerts:
    """A Slack channel that receives alerts."""

    url_file: str
    channel: str = ""  # name of the channel; "" means the webhook's default channel


@dataclass(frozen=True)
class WebhookAlerts:
    """A program that receives alerts. Its address is `url`, or the content of `url_file`."""

    url: str = ""
    url_file: str = ""


@dataclass(frozen=True)
class RemoteWrite:
    """A workspace of Amazon Managed Service for Prometheus that receives all metrics."""

    url: str
    region: str
    role_arn: str = ""


@dataclass(frozen=True)
class Monitoring:
    """Metrics, the web page, Prometheus and alerts."""

    enabled: bool = True
    compat: str = "vpenso"  # naming scheme of Slurm's metrics: vpenso or sckyzo
    open_metrics: bool = False
    interval_s: int = 15  # interval at which metrics are collected, and scraped by Prometheus
    prometheus: bool = False
    retention_s: int = 15 * 86400
    email: tuple[EmailAlerts, ...] = ()
    slack: tuple[SlackAlerts, ...] = ()
    webhook: tuple[WebhookAlerts, ...] = ()
    remote_write: RemoteWrite | None = None
    gpu_hour_price: float | None = None  # price of one GPU hour; None means the list price


@dataclass(frozen=True)
class Cluster:
    """A resolved cluster."""

    name: str
    target: str
    nodes: tuple[Node, ...]
    partitions: tuple[Partition, ...]
    head: str = "head"
    logins: tuple[str, ...] = ()
    slurm: Slurm = field(default_factory=Slurm)
    accounts: tuple[Account, ...] = ()
    users: tuple[User, ...] = ()
    groups: tuple[Group, ...] = ()
    directory: Directory = field(default_factory=Directory)
    reservations: tuple[Reservation, ...] = ()
    storage: tuple[Storage, ...] = ()
    local: Local = field(default_factory=Local)
    ssh: SshAccess = field(default_factory=SshAccess)
    health: Health = field(default_factory=Health)
    containers: Containers = field(default_factory=Containers)
    monitoring: Monitoring = field(default_factory=Monitoring)
    platform: str = ""  # the platform that created a cluster of `target: existing`
    hyperpod: HyperPodFacts | None = None
    oci: OciFacts | None = None
    parallelcluster: PclusterSettings | None = None

    @classmethod
    def foreign(cls, name: str, slurm: Slurm) -> Cluster:
        """Return a cluster that Dal Segno did not create, and that has no cluster file."""
        return cls(name, FOREIGN_TARGET, (), (), slurm=slurm)

    @property
    def names_hosts(self) -> bool:
        """Return whether the cluster file names existing hosts, which are reached over ssh."""
        return self.target == "ssh"

    @property
    def is_foreign(self) -> bool:
        """Return whether the cluster file describes a cluster that Dal Segno did not create, and does not change."""
        return self.target == FOREIGN_TARGET


_T = TypeVar("_T")
_KNOWN: dict[type[object], dict[str, Any]] = {}


def facts_to_json(facts: object) -> dict[str, Any]:
    """Return a dataclass as a dict that `json.dumps` accepts."""
    return {name: _plain(getattr(facts, name)) for name in _hints(type(facts))}


def _plain(value: object) -> Any:
    if is_dataclass(value):
        return facts_to_json(value)
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def facts_from_json(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """Return a dataclass of `kind` from the result of `facts_to_json`. Raise DalsegnoError if the data does not fit."""
    hints = _hints(kind)
    missing = _required(kind) - data.keys()
    if missing:
        raise _broken(kind, f"`{min(missing)}` is missing")
    return kind(**{name: _read(hints[name], value, kind) for name, value in data.items() if name in hints})


def _read(hint: Any, value: Any, kind: type) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        only = next(each for each in inner if each is not type(None))
        return None if value is None else _read(only, value, kind)
    if is_dataclass(hint) and isinstance(value, Mapping):
        return facts_from_json(cast("type[Any]", hint), value)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], each, kind) for each in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {_key(inner[0], key, kind): _read(inner[1], each, kind) for key, each in value.items()}
    return _scalar(hint, value, kind)


def _key(hint: Any, key: str, kind: type) -> Any:
    return _scalar(hint, key, kind) if isinstance(hint, type) and issubclass(hint, Enum) else key


def _scalar(hint: Any, value: Any, kind: type) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise _broken(kind, f"{value!r:.40} is not of type {hint.__name__}") from None
    if hint is float and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            raise _broken(kind, "a number is too large") from None
    if hint is Any or (isinstance(hint, type) and type(value) is hint):
        return value
    raise _broken(kind, f"{value!r:.40} is not of type {getattr(hint, '__name__', hint)}")


def _broken(kind: type, why: str) -> DalsegnoError:
    what = f"a saved {kind.__name__.lower()} cannot be read: {why}"
    return DalsegnoError(what, hint="check whether the file was edited by hand")


def _hints(kind: type[object]) -> dict[str, Any]:
    """Return the fields and their types from a cache, because resolving types is slow and a cluster has many nodes."""
    if kind not in _KNOWN:
        found = get_type_hints(kind)
        _KNOWN[kind] = {each.name: found[each.name] for each in fields(cast("Any", kind))}
    return _KNOWN[kind]


def _required(kind: type[object]) -> set[str]:
    everything = fields(cast("Any", kind))
    return {each.name for each in everything if each.default is MISSING and each.default_factory is MISSING}
