"""The contract of every target: plan, apply, status, shell, and operations on single nodes.

Code outside `targets/` uses only this module, `machines`, `registry` and `folder`. An ability that only some targets
have is a separate protocol, such as `CanReplace`. `isinstance` tests for one, and `require` raises if it is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from dalsegno.errors import TargetError
from dalsegno.hostlist import compress
from dalsegno.slurm.facts import JobInfo, JobState
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import find_user, user_of

if TYPE_CHECKING:  # for type checks only, because an ordinary `up` must not import fault injection
    from dalsegno.inject.faults import FaultOptions, InjectableFault, InjectedFault
    from dalsegno.observe.monitor_layout import MonitorLayout
    from dalsegno.slurm.client import SlurmClient
    from dalsegno.users.roster import Roster

Say = Callable[[str], None]  # reports one line of progress


class Plan(Protocol):
    """The changes that `apply` will make, as a value that can be shown first."""

    @property
    def empty(self) -> bool: ...

    @property
    def only_user(self) -> str:
        """The one account that runs all jobs; "" if each user of the cluster file has an account."""

    @property
    def import_images(self) -> tuple[str, ...]:
        """Container images to import once the cluster is up."""

    def sentences(self) -> list[str]:
        """Return the consequences, such as "adds 2 nodes", "restarts nothing", "ends no job"."""

    def details(self) -> list[str]:
        """Return additional lines that only `dalsegno plan` shows."""


@dataclass(frozen=True)
class Removal:
    """The jobs that `destroy` would end, the home folders and storage that it would delete, and what it would keep."""

    jobs: tuple[JobInfo, ...] = ()
    homes: tuple[str, ...] = ()
    storage: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    needs_yes: bool = False  # whether scripts must use `--yes`, because deleted cloud storage cannot be restored

    def sentences(self, runs: Collection[str]) -> list[str]:
        """Return the consequences of the removal. Jobs of the active runs `runs` are not listed separately."""
        return list(self._sentences(runs))

    def _sentences(self, runs: Collection[str]) -> Iterator[str]:
        others = [f"{job.label} of {job.user}" for job in self.jobs if job.name not in runs]
        if runs:
            yield f"ends {named('run', runs)}"
        if others:
            yield f"ends {named('job', others)}"
        if self.homes:
            yield f"deletes {named('home folder', self.homes)}, with all runs and checkpoints in them"
        if self.storage:
            yield f"deletes the files of storage {', '.join(self.storage)}"
        if self.kept:
            yield f"keeps {', '.join(self.kept)}"


def named(noun: str, names: Iterable[str]) -> str:
    """Return a phrase such as `2 nodes (n1, n2)`, with at most four names."""
    names = list(names)
    shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
    return f"{counted(len(names), noun)} ({shown})"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class DaemonStatus:
    """A daemon of the cluster, the host that should run it, and whether it runs."""

    host: str
    name: str
    running: bool
    detail: str = ""


@dataclass(frozen=True)
class DaemonLog:
    """The log of a daemon on this host. Older parts are in the same folder, with the suffix `.1`, `.2` and so on."""

    host: str
    name: str
    path: Path


@dataclass(frozen=True)
class NodeStatus:
    name: str
    state: str  # sinfo's state, such as "idle" or "down*"; "off" if the host is off; "unknown" if Slurm does not answer
    reason: str = ""
    partitions: tuple[str, ...] = ()
    gpus: int = 0
    gpus_used: int | None = 0  # None if Slurm does not report the number
    gpu_type: str = ""
    address: str = ""
    spare: bool = False
    off: bool = False  # whether the host is off, which Slurm notices only later
    reason_user: str = ""  # the user who set the reason


@dataclass(frozen=True)
class JobStatus:
    id: str
    name: str
    user: str
    partition: str
    state: JobState
    nodes: str
    gpus: int
    elapsed_s: int
    reason: str = ""


def job_status(job: JobInfo) -> JobStatus:
    return JobStatus(
        id=job.label, name=job.name, user=job.user, partition=job.partition, state=job.state,
        nodes=compress(job.nodes), gpus=job.gpus, elapsed_s=job.elapsed_s, reason=job.reason,
    )  # fmt: skip


class ClusterPhase(Enum):
    """The phases of a cluster: whether it is complete, and whether it works."""

    UP = "up"
    DEGRADED = "degraded"  # the cluster is up, but has problems
    HALF_MADE = "half-made"
    CHANGING = "changing"  # a change is in progress, or was interrupted
    HALF_REMOVED = "half-removed"
    STOPPED = "stopped"  # the head host or slurmctld does not run
    DAMAGED = "damaged"  # the state file cannot be read
    GONE = "gone"


@dataclass(frozen=True)
class ClusterStatus:
    """The present state of a cluster. `problems` say why the cluster is not fully up."""

    name: str
    target: str
    phase: ClusterPhase
    nodes: tuple[NodeStatus, ...] = ()
    daemons: tuple[DaemonStatus, ...] = ()
    jobs: tuple[JobStatus, ...] | None = ()  # None if Slurm does not answer
    problems: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ClusterSummary:
    """One line of `dalsegno ls`."""

    target: str
    phase: ClusterPhase
    nodes: int


@dataclass(frozen=True)
class ShellEntry:
    """The command that opens a shell on the cluster or runs one command there."""

    argv: list[str]
    env: dict[str, str]
    uid: int | None = None  # the user that the command runs as; None means the caller
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RootUse:
    """An advantage that a cluster has only if root creates it. `instead` is what other clusters have in its place."""

    needs: str
    instead: str = ""


@dataclass(frozen=True)
class NodeTimes:
    """Time limits for nodes: `boot_s` for a boot, and `gone_s` for the return of a lost node before its repair."""

    boot_s: float
    gone_s: float


class Target(Protocol):
    """The part of a target that all platforms have. One object stands for one cluster."""

    @property
    def kind(self) -> str:
        """The name of the target in cluster files."""

    def root_use(self, cluster: Cluster) -> RootUse | None:
        """Return what a new cluster gets only if root creates it; None if root makes no difference."""

    def plan(self, cluster: Cluster) -> Plan: ...

    def apply(self, plan: Plan, say: Say) -> None:
        """Carry out a plan. After an interruption, the plan of the next `up` contains the remaining steps."""

    def import_images(self, plan: Plan, say: Say) -> None:
        """Import the plan's container images. The cluster is already up, and may be used and changed meanwhile."""

    def removal(self) -> Removal: ...

    def destroy(self, say: Say) -> bool:
        """Remove everything; return False if there was nothing."""

    def status(self) -> ClusterStatus:
        """Return the state of the cluster. Daemons that do not answer are reported as problems."""

    def summary(self) -> ClusterSummary:
        """Return a summary of the state. This is quick: it runs no command of Slurm and calls no platform."""

    def daemon_logs(self) -> Sequence[DaemonLog]:
        """Return the logs of the cluster's daemons, running or not."""

    def owner(self) -> int | None:
        """Return the uid of the user who created the cluster; None if it cannot be read."""

    @property
    def slurm(self) -> SlurmClient: ...

    def slurm_as(self, user: str) -> SlurmClient:
        """Return a client that runs Slurm's commands as a user of the cluster."""

    def slurm_runs(self) -> bool:
        """Return whether slurmctld runs. Call this before Slurm's commands, which wait half a minute if it does not."""

    @property
    def controller_socket(self) -> Path: ...

    def user_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make a shell with `env` use this cluster."""

    def shell(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        *,
        host: str | None = None,
        user: str | None = None,
    ) -> ShellEntry:
        """Return how to start a shell or one command on `host`, or by default on a login node or the head."""

    def on_node(self, node: str, command: Sequence[str], env: Mapping[str, str], cwd: str) -> ShellEntry:
        """Return how to run one command on a node, in the environment of the node's services."""

    def job_images(self) -> str:
        """Return the folder where jobs find container images by name; "" if each user has their own folder."""

    @property
    def node_times(self) -> NodeTimes: ...


@runtime_checkable
class HasVirtualNodes(Protocol):
    """A target with virtual hosts. They have the CPUs, memory and GPUs of their instance type, but not its network."""

    virtual_nodes: bool


@runtime_checkable
class CanReset(Protocol):
    """A target that can reset a node's GPUs while the node stays up."""

    def reset_gpus(self, node: str) -> None: ...


@runtime_checkable
class CanReboot(Protocol):
    """A target that can reboot a node, even if it hangs or is off. Set the node down in Slurm first."""

    def reboot(self, node: str) -> None: ...


@runtime_checkable
class CanReplace(Protocol):
    """A target that can put another machine in a node's place, under the same name. When `replace` returns, the old
    machine is off and the new one is booting. `replace` may be called again for the same node."""

    def replace(self, node: str) -> None: ...


@runtime_checkable
class HasMachines(Protocol):
    """A target whose machines only a person can replace. `machines` identifies the machine of each node by a text."""

    def machines(self) -> Mapping[str, str]: ...


@runtime_checkable
class CanResize(Protocol):
    """A target that can change the number of a partition's nodes without a new cluster file."""

    def resize(self, partition: str, nodes: int) -> None: ...


@runtime_checkable
class CanSeePower(Protocol):
    """A target that knows whether a machine is off, as a BMC or a cloud's API does."""

    def is_off(self, node: str) -> bool:
        """Return whether the machine is certainly off and will stay off. This must not block for long."""


@runtime_checkable
class CanReadLogs(Protocol):
    """A target that can read the console or the logs of a machine that no longer responds."""

    def read_logs(self, node: str) -> Mapping[str, str]:
        """Return the logs by file name. This does not wait for the machine."""


@runtime_checkable
class CanSeeDaemons(Protocol):
    """A target that can list which daemons of its hosts have stopped. This also works from inside a host."""

    def dead_daemons(self) -> Sequence[DaemonStatus]:
        """Return the daemons that should run but do not. This does not ask Slurm."""


@runtime_checkable
class CanNameUsers(Protocol):
    """A target that knows the names of its cluster's users, including users without an account on this host."""

    def user_name(self, uid: int) -> str:
        """Return the name of a user, or a phrase with the uid if the name is unknown."""


@runtime_checkable
class CanInject(Protocol):
    """A target that can inject faults into its nodes."""

    def inject(self, fault: InjectableFault, node: str, options: FaultOptions) -> Mapping[str, Any]:
        """Inject a fault and return what was done. A lasting fault is recorded before it begins."""

    def injected(self) -> Sequence[InjectedFault]:
        """Return all lasting faults that were injected and are not undone yet."""

    def clear(self, node: str, fault: str | None = None) -> Sequence[InjectedFault]:
        """Undo the lasting faults of a node, or only `fault`, and return the faults that were undone."""


@dataclass(frozen=True)
class PeopleView:
    """The users and groups of a cluster, with their ids. `directory` is the DN of users in LDAP; "" without LDAP."""

    cluster: Cluster
    uids: Mapping[str, int]  # the uids of users that exist only in the cluster
    gids: Mapping[str, int]
    homes: Path
    directory: str = ""
    elsewhere: bool = False  # whether the home folders are on other machines


@runtime_checkable
class CanManageUsers(Protocol):
    """A target that can change the users and groups of a running cluster."""

    def people(self) -> PeopleView:
        """Return the users and groups that the last `up` or `dalsegno user` has set up."""

    def change_people(self, roster: Roster) -> Plan:
        """Return the plan that leaves the cluster with the users and groups of its file and of `roster`."""

    def set_password(self, user: str, password: str) -> None:
        """Set a user's password in the cluster's LDAP directory. Raise an error if there is no directory."""


@runtime_checkable
class CanMonitor(Protocol):
    """A target that can run Prometheus, Alertmanager and node_exporter for a cluster."""

    def switch_monitor(self, on: bool) -> Plan:
        """Return the plan that switches monitoring on or off until the setting in the cluster file changes."""

    def has_monitor(self) -> bool:
        """Return whether monitoring is on."""

    def monitor_layout(self) -> MonitorLayout:
        """Return the addresses and files of the monitoring programs, whether they run or not."""


@runtime_checkable
class CanUpgrade(Protocol):
    """A target whose hosts get new versions of our code only with a plan from `plan_upgrade`."""

    def plan_upgrade(self, cluster: Cluster) -> Plan: ...


@runtime_checkable
class CanForward(Protocol):
    """A target whose cluster is on other machines. Most commands run on the head, with the code installed there."""

    def on_head(self, command: Sequence[str]) -> ShellEntry: ...  # as the login user

    def forward(self, arguments: Sequence[str], *, root: bool = False) -> ShellEntry | None:
        """Return how to run `dalsegno ARGUMENTS` on the head, as root or as the login user; None to run it here."""


def name_user(target: Target | None, uid: int) -> str:
    """Return the name of a user from this host's accounts, or else from the target."""
    return find_user(uid) or (target.user_name(uid) if isinstance(target, CanNameUsers) else user_of(uid))


_Ability = TypeVar("_Ability")
_ABILITIES: dict[type[Any], tuple[str, str]] = {  # protocol -> its purpose, and the hint if it is missing
    CanReset: ("reset GPUs", "reboot or replace the node"),
    CanReboot: ("reboot nodes", "reboot the machine by hand"),
    CanReplace: ("replace nodes", "replace the machine by hand, then run `dalsegno up`"),
    CanResize: ("resize partitions", "change `nodes` in the cluster file, then run `dalsegno up`"),
    CanSeePower: ("see whether machines are off", ""),
    CanReadLogs: ("read the logs of machines that are off", ""),
    CanNameUsers: ("name the users of its hosts", ""),
    CanSeeDaemons: ("see which daemons run", ""),
    CanMonitor: ("run Prometheus", "`dalsegno monitor config` writes the configuration for your own Prometheus"),
    CanManageUsers: ("change users", "change `users` in the cluster file"),
    CanUpgrade: ("update Dal Segno on its hosts", "plain `dalsegno up` uses the version here"),
    CanInject: ("inject faults", "use a cluster with `target: local`: `dalsegno ls` shows them"),
}


def require(target: Target, ability: type[_Ability]) -> _Ability:
    """Return the target as an object with this ability. Raise TargetError if the target lacks the ability."""
    if isinstance(target, ability):
        return target
    purpose, instead = _ABILITIES[ability]
    raise TargetError(f"target `{target.kind}` cannot {purpose}", hint=instead)
