"""What every target is: it plans, applies a plan, tells its status and takes the cluster down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dalsegno.slurm.facts import JobState
from dalsegno.spec.facts import Cluster

if TYPE_CHECKING:  # an ordinary `up` imports nothing of fault injection
    from dalsegno.inject.faults import FaultOptions, InjectableFault, InjectedFault

Say = Callable[[str], None]  # one line of progress


class Plan(Protocol):
    """What `apply` will do, as a value that can be shown first."""

    @property
    def empty(self) -> bool: ...

    def sentences(self) -> list[str]:
        """The consequences, in words: "adds 2 nodes", "restarts nothing", "ends no job"."""
        ...


@dataclass(frozen=True)
class DaemonStatus:
    """A daemon of the cluster: where it should run, and whether it does."""

    host: str
    name: str
    running: bool
    detail: str = ""


@dataclass(frozen=True)
class NodeStatus:
    name: str
    state: str  # sinfo's word: "idle", "drained", "down*"; "off" where its host is; "unknown" where Slurm cannot say
    reason: str = ""
    partitions: tuple[str, ...] = ()
    gpus: int = 0
    gpus_used: int | None = 0  # None: Slurm does not say
    gpu_type: str = ""
    address: str = ""
    spare: bool = False


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


class ClusterPhase(Enum):
    """How far a cluster is made, and whether it works."""

    UP = "up"
    DEGRADED = "degraded"  # up, with problems
    HALF_MADE = "half-made"
    CHANGING = "changing"  # a change of it was interrupted
    HALF_REMOVED = "half-removed"
    STOPPED = "stopped"  # its head host does not run
    DAMAGED = "damaged"  # its state cannot be read
    GONE = "gone"


@dataclass(frozen=True)
class ClusterStatus:
    """A cluster as it is now; `problems` say why it is not simply up."""

    name: str
    target: str
    phase: ClusterPhase
    nodes: tuple[NodeStatus, ...] = ()
    daemons: tuple[DaemonStatus, ...] = ()
    jobs: tuple[JobStatus, ...] | None = ()  # None: Slurm does not say
    problems: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


class Target(Protocol):
    """One cluster on one kind of machine."""

    def plan(self, cluster: Cluster) -> Plan: ...

    def apply(self, plan: Plan, say: Say) -> None: ...

    def destroy(self, say: Say) -> bool:
        """Remove everything; False if there was nothing."""
        ...

    def status(self) -> ClusterStatus: ...


@runtime_checkable
class CanInject(Protocol):
    """A target that can inject faults into its nodes."""

    def inject(self, fault: InjectableFault, node: str, options: FaultOptions) -> Mapping[str, Any]:
        """Inject a fault and return what was done. One that lasts is recorded before it begins."""
        ...

    def injected(self) -> Sequence[InjectedFault]:
        """Return all faults that last."""
        ...

    def clear(self, node: str, fault: str | None = None) -> Sequence[InjectedFault]:
        """Undo all faults of a node that last, or only this one, and return them."""
        ...


@runtime_checkable
class CanReset(Protocol):
    """A target that can reset a node's GPUs while the node stays up."""

    def reset_gpus(self, node: str) -> None: ...


@runtime_checkable
class CanReboot(Protocol):
    """A target that can boot a node anew, whether it is on, hangs or is off. Slurm must not count on it meanwhile."""

    def reboot(self, node: str) -> None: ...


@runtime_checkable
class CanReplace(Protocol):
    """A target that can put another machine in a node's place, under the same name. The old one is off when this
    returns, and the new one on its way; both words may be said again."""

    def replace(self, node: str) -> None: ...


@runtime_checkable
class CanSeePower(Protocol):
    """A target that knows whether a machine is off, as a BMC or a cloud's API does."""

    def is_off(self, node: str) -> bool:
        """Whether that is certain: then it does not come back by itself. May not wait for an answer for long."""
        ...


@runtime_checkable
class CanTell(Protocol):
    """A target that knows something of a machine that cannot speak any more: its console, its logs."""

    def last_words(self, node: str) -> Mapping[str, str]:
        """As files, by name. None of it may wait for the machine."""
        ...
