"""The states of nodes and jobs. A word we do not know is UNKNOWN, never an error: Slurm grows new ones."""

from __future__ import annotations

from enum import Enum


class NodeState(Enum):
    """What a node is in the first place; what else holds of it are its flags."""

    IDLE = "IDLE"
    MIXED = "MIXED"
    ALLOCATED = "ALLOCATED"
    DOWN = "DOWN"
    ERROR = "ERROR"
    FUTURE = "FUTURE"
    UNKNOWN = "UNKNOWN"  # also Slurm's own word for a node that has not reported yet


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
    EXPEDITING = "EXPEDITING"  # since 25.11: requeued, and to start before others
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

    @property
    def ended(self) -> bool:
        """Whether the job is over for good."""
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

# sinfo folds a state and a flag into one word, and has a short and a long one for most.
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

# ... and hangs a sign on it.
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
    """`IDLE+DRAIN+NOT_RESPONDING` as scontrol writes it, or `drained*` as sinfo does."""
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
    """`RUNNING`, `CANCELLED by 1000`, `COMPLETED,REQUEUED`: the first word is the state."""
    words = text.replace("+", " ").replace(",", " ").split()
    return JobState.__members__.get(words[0].upper(), JobState.UNKNOWN) if words else JobState.UNKNOWN
