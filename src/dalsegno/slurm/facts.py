"""Nodes and jobs as Slurm reports them. States that this version does not know become UNKNOWN instead of an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class NodeState(Enum):
    """The base state of a node. `NodeFlag` contains the flags that Slurm adds to it."""

    IDLE = "IDLE"
    MIXED = "MIXED"
    ALLOCATED = "ALLOCATED"
    DOWN = "DOWN"
    ERROR = "ERROR"
    FUTURE = "FUTURE"
    UNKNOWN = "UNKNOWN"  # also Slurm's own state for a node that has not registered yet


class NodeFlag(Enum):
    BLOCKED = "BLOCKED"
    CLOUD = "CLOUD"
    COMPLETING = "COMPLETING"
    DRAIN = "DRAIN"
    DYNAMIC_FUTURE = "DYNAMIC_FUTURE"
    DYNAMIC_NORM = "DYNAMIC_NORM"
    EXTERNAL = "EXTERNAL"
    FAIL = "FAIL"
    INVALID_REG = "INVALID_REG"
    MAINTENANCE = "MAINTENANCE"
    NOT_RESPONDING = "NOT_RESPONDING"
    PERFCTRS = "PERFCTRS"
    PLANNED = "PLANNED"
    POWER_DOWN = "POWER_DOWN"
    POWER_UP = "POWER_UP"
    POWERED_DOWN = "POWERED_DOWN"
    POWERING_DOWN = "POWERING_DOWN"
    POWERING_UP = "POWERING_UP"
    REBOOT_CANCELED = "REBOOT_CANCELED"
    REBOOT_ISSUED = "REBOOT_ISSUED"
    REBOOT_REQUESTED = "REBOOT_REQUESTED"
    RESERVED = "RESERVED"
    RESUME = "RESUME"
    UNDRAIN = "UNDRAIN"
    UNKNOWN = "UNKNOWN"


class JobState(Enum):
    BOOT_FAIL = "BOOT_FAIL"
    CANCELLED = "CANCELLED"
    COMPLETED = "COMPLETED"
    COMPLETING = "COMPLETING"
    CONFIGURING = "CONFIGURING"
    DEADLINE = "DEADLINE"
    EXPEDITING = "EXPEDITING"  # a requeued job with priority over other jobs; since 25.11
    FAILED = "FAILED"
    LAUNCH_FAILED = "LAUNCH_FAILED"
    NODE_FAIL = "NODE_FAIL"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    PENDING = "PENDING"
    PREEMPTED = "PREEMPTED"
    RECONFIG_FAIL = "RECONFIG_FAIL"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    RESIZING = "RESIZING"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    RUNNING = "RUNNING"
    SIGNALING = "SIGNALING"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    STAGE_OUT = "STAGE_OUT"
    STOPPED = "STOPPED"
    SUSPENDED = "SUSPENDED"
    TIMEOUT = "TIMEOUT"
    UNKNOWN = "UNKNOWN"

    __hash__ = object.__hash__  # Enum's __hash__ is ten times slower, and metrics group 100,000 jobs by state

    @property
    def ended(self) -> bool:
        """Return whether the job has ended for good."""
        return self in _ENDED


_ENDED = frozenset(
    {
        JobState.BOOT_FAIL,
        JobState.CANCELLED,
        JobState.COMPLETED,
        JobState.DEADLINE,
        JobState.FAILED,
        JobState.LAUNCH_FAILED,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.PREEMPTED,
        JobState.REVOKED,
        JobState.TIMEOUT,
    }
)

# sinfo combines a state and a flag in one word. Most words have a short and a long form.
_FOLDED = {
    "ALLOC": (NodeState.ALLOCATED, ()),
    "MIX": (NodeState.MIXED, ()),
    "UNK": (NodeState.UNKNOWN, ()),
    "FUTR": (NodeState.FUTURE, ()),
    "N/A": (NodeState.UNKNOWN, ()),
    "DRAINED": (NodeState.IDLE, (NodeFlag.DRAIN,)),
    "DRAINING": (NodeState.ALLOCATED, (NodeFlag.DRAIN,)),
    "DRNG": (NodeState.ALLOCATED, (NodeFlag.DRAIN,)),
    "COMP": (NodeState.UNKNOWN, (NodeFlag.COMPLETING,)),
    "FAILING": (NodeState.ALLOCATED, (NodeFlag.FAIL,)),
    "FAILG": (NodeState.ALLOCATED, (NodeFlag.FAIL,)),
    "INVAL": (NodeState.UNKNOWN, (NodeFlag.INVALID_REG,)),
    "MAINT": (NodeState.UNKNOWN, (NodeFlag.MAINTENANCE,)),
    "PLND": (NodeState.UNKNOWN, (NodeFlag.PLANNED,)),
    "RESV": (NodeState.UNKNOWN, (NodeFlag.RESERVED,)),
    "BOOT": (NodeState.UNKNOWN, (NodeFlag.REBOOT_REQUESTED,)),
    "REBOOT": (NodeState.UNKNOWN, (NodeFlag.REBOOT_REQUESTED,)),
}

# sinfo appends a sign for some flags.
_SIGNS = {
    "*": NodeFlag.NOT_RESPONDING,
    "~": NodeFlag.POWERED_DOWN,
    "#": NodeFlag.POWERING_UP,
    "!": NodeFlag.POWER_DOWN,
    "%": NodeFlag.POWERING_DOWN,
    "$": NodeFlag.MAINTENANCE,
    "@": NodeFlag.REBOOT_REQUESTED,
    "^": NodeFlag.REBOOT_ISSUED,
    "-": NodeFlag.PLANNED,
}


def parse_node_state(text: str) -> tuple[NodeState, frozenset[NodeFlag]]:
    """Parse a state from scontrol, such as `IDLE+DRAIN+NOT_RESPONDING`, or from sinfo, such as `drained*`."""
    state = NodeState.UNKNOWN
    flags: set[NodeFlag] = set()
    for word in text.strip().upper().split("+"):
        bare = word.rstrip("".join(_SIGNS))
        flags.update(_SIGNS[sign] for sign in word[len(bare) :])
        found, more = _node_word(bare)
        state = found if found is not NodeState.UNKNOWN else state
        flags.update(more)
    return state, frozenset(flags)


def _node_word(word: str) -> tuple[NodeState, tuple[NodeFlag, ...]]:
    if word in NodeState.__members__:
        return NodeState[word], ()
    if word in NodeFlag.__members__:
        return NodeState.UNKNOWN, (NodeFlag[word],)
    return _FOLDED.get(word, (NodeState.UNKNOWN, (NodeFlag.UNKNOWN,)))


def parse_job_state(text: str) -> JobState:
    """Parse a state such as `RUNNING`, `CANCELLED by 1000` or `COMPLETED,REQUEUED`. Only its first word counts."""
    words = text.replace("+", " ").replace(",", " ").split()
    return JobState.__members__.get(words[0].upper(), JobState.UNKNOWN) if words else JobState.UNKNOWN


@dataclass(frozen=True)
class NodeInfo:
    """A node as Slurm reports it. Times are Unix times."""

    name: str
    state: NodeState
    flags: frozenset[NodeFlag] = frozenset()
    state_text: str = ""  # the state as printed by Slurm
    reason: str = ""
    reason_user: str = ""
    reason_at: int | None = None
    partitions: tuple[str, ...] = ()
    gpus: int = 0
    gpus_used: int = 0
    gpu_type: str = ""
    cpus: int = 0
    cpus_used: int = 0
    memory_mib: int = 0
    memory_used_mib: int = 0
    address: str = ""
    hostname: str = ""
    port: int = 0
    features: tuple[str, ...] = ()
    weight: int = 1
    version: str = ""
    booted_at: int | None = None
    slurmd_started_at: int | None = None
    gpu_indexes: tuple[int, ...] = ()  # indexes of the GPUs in use; () if Slurm does not list them

    @property
    def drained(self) -> bool:
        """Return whether the node is set to drain and no job is left on it."""
        return self.draining and self.state not in (NodeState.ALLOCATED, NodeState.MIXED) and not self.completing

    @property
    def draining(self) -> bool:
        """Return whether the node is set to drain, with or without jobs on it."""
        return NodeFlag.DRAIN in self.flags

    @property
    def completing(self) -> bool:
        return NodeFlag.COMPLETING in self.flags

    @property
    def down(self) -> bool:
        return self.state in (NodeState.DOWN, NodeState.ERROR)

    @property
    def responding(self) -> bool:
        return NodeFlag.NOT_RESPONDING not in self.flags

    @property
    def powered_down(self) -> bool:
        """Return whether Slurm has powered the node down, or is about to, until a job needs it."""
        return bool(self.flags & {NodeFlag.POWERED_DOWN, NodeFlag.POWERING_DOWN, NodeFlag.POWER_DOWN})

    @property
    def on_demand(self) -> bool:
        """Return whether Slurm has powered the node down, or is powering it down or up. Nodes out of service do not
        count."""
        return bool(self.flags & _POWER_SAVING) and not (self.draining or self.down)

    @property
    def word(self) -> str:
        """The state as sinfo writes it: idle, drained, down*."""
        word = self.state.value.lower()
        if self.draining and not self.down:
            word = "drained" if self.drained else "draining"
        return word if self.responding else f"{word}*"

    @property
    def in_service(self) -> bool:
        """Return whether Slurm would start a job on this node, now or when the current jobs end.

        A powered-down node is not in service, although Slurm powers it up for a job.
        """
        busy_or_free = self.state in (NodeState.IDLE, NodeState.MIXED, NodeState.ALLOCATED)
        return busy_or_free and self.responding and not self.flags & _OUT_OF_SERVICE


_POWER_SAVING = {
    NodeFlag.POWER_DOWN,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.POWER_UP,
    NodeFlag.POWERING_UP,
}
_OUT_OF_SERVICE = {
    NodeFlag.DRAIN,
    NodeFlag.FAIL,
    NodeFlag.INVALID_REG,
    NodeFlag.MAINTENANCE,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.REBOOT_ISSUED,
}


@dataclass(frozen=True)
class JobInfo:
    """One job, as reported by any of Slurm's commands. Times are Unix times.

    For a pending job, `cpus`, `gpus` and `memory_mib` are requested amounts, and `started_at` is Slurm's estimate.
    """

    id: int
    name: str
    user: str
    state: JobState
    uid: int | None = None  # None if the command does not report it
    account: str = ""
    qos: str = ""
    partition: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    node_count: int = 0
    cpus: int = 0
    gpus: int = 0
    memory_mib: int = 0
    priority: int = 0
    array_id: int | None = None
    array_task: str = ""  # such as "3", or "4-9%2" for tasks that have not started
    het_id: int | None = None
    het_offset: int | None = None
    submitted_at: int | None = None
    started_at: int | None = None
    ends_at: int | None = None  # when the job ended, or the latest time at which it will end
    preempted_at: int | None = None
    elapsed_s: int = 0
    time_limit_s: int | None = None  # None: no limit
    exit_code: int = 0
    exit_signal: int = 0
    restarts: int = 0
    reservation: str = ""
    batch_host: str = ""
    comment: str = ""
    batch: bool = False  # whether the job has a script, so that Slurm can requeue it
    # The fields below are known only if a single job was queried by its id.
    work_dir: str = ""
    command: str = ""
    excluded: tuple[str, ...] = ()  # nodes that the job excludes
    stdout: str = ""
    stderr: str = ""

    @property
    def label(self) -> str:
        """The id in Slurm's notation: `5`, `5_3` or `5+1`."""
        if self.array_id is not None:
            return f"{self.array_id}_{self.array_task if self.array_task.isdigit() else f'[{self.array_task}]'}"
        return f"{self.het_id}+{self.het_offset}" if self.het_id is not None else str(self.id)


@dataclass(frozen=True)
class AccountsInfo:
    """The content of the accounting database, in sacctmgr's spelling. It is empty for a new database."""

    qos: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    accounts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    members: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)  # (user, account) -> settings
    users: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
