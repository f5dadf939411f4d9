"""The events and orders of a run's state machine, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dalsegno.runs.coordinator.generations.causes import Failure
from dalsegno.runs.coordinator.generations.group import Members
from dalsegno.runs.status import RunCause


@dataclass(frozen=True)
class AgentJoined:
    """An agent has connected and its warm parent is ready."""

    agent: str


@dataclass(frozen=True)
class AgentGone:
    """The run can no longer use an agent, for example because its connection broke or its host does not answer."""

    agent: str


@dataclass(frozen=True)
class StoreOpened:
    agent: str
    generation: int
    port: int


@dataclass(frozen=True)
class WorkerEnded:
    """A worker ended, but not because its agent stopped it. As in Python, `code` is negative for a signal."""

    agent: str
    generation: int
    rank: int
    code: int
    failure: Failure | None = None  # details, if the worker failed
    age_s: float = 0.0  # how long the generation has run


@dataclass(frozen=True)
class GenerationStopped:
    """An agent has killed its workers of this generation. `failures` lists workers that had already failed."""

    agent: str
    generation: int
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Hung:
    """The generation hangs: it has made no progress for too long."""

    generation: int
    why: str
    age_s: float = 0.0


@dataclass(frozen=True)
class PauseOver:
    """The pause before the next start is over."""


@dataclass(frozen=True)
class NodesReclaimed:
    """The run is about to lose its nodes.

    At a time limit or a preemption, Slurm has already signalled the workers to save and exit. Otherwise, the run orders
    the workers to save within `save_s` seconds.
    """

    save_s: float = 0.0


@dataclass(frozen=True)
class NodesTaken:
    """A cloud will reclaim these nodes. `nodes` maps each node to the reason.

    Workers have `save_s` seconds to save. The run then leaves the nodes.
    """

    nodes: Mapping[str, str]
    save_s: float


@dataclass(frozen=True)
class SaveOverdue:
    """The time to save before the run leaves nodes is over. Workers that still run are stopped."""

    generation: int


@dataclass(frozen=True)
class RunMoved:
    """The old nodes are released; agents that join from now on belong to another job."""


@dataclass(frozen=True)
class Cancelled:
    """The user cancelled the run."""


@dataclass(frozen=True)
class GatherTimeout:
    """The run has waited long enough for all of its nodes and may start with fewer."""


@dataclass(frozen=True)
class NodesOutOfService:
    """The set of nodes that are out of service. Workers there may continue; new ones start there only if necessary."""

    nodes: frozenset[str]


Event = (
    AgentJoined
    | AgentGone
    | StoreOpened
    | WorkerEnded
    | GenerationStopped
    | Hung
    | PauseOver
    | NodesReclaimed
    | NodesTaken
    | SaveOverdue
    | RunMoved
    | Cancelled
    | GatherTimeout
    | NodesOutOfService
)
# Agents report these events again to the next coordinator, or the next coordinator notices that an agent is missing.
# Other events, such as NodesReclaimed, are reported only once.
REPEATED = (AgentJoined, AgentGone, WorkerEnded, GenerationStopped)


@dataclass(frozen=True)
class OpenStore:
    """Open the listening socket of this generation's store and report its port."""

    agent: str
    generation: int


@dataclass(frozen=True)
class Start:
    """Fork the workers of this generation."""

    agent: str
    group: Members
    store_port: int
    restarts: int


@dataclass(frozen=True)
class SaveGeneration:
    """Tell the workers of this generation to save and exit. Those that take longer than `within_s` are stopped."""

    agents: tuple[str, ...]
    generation: int
    within_s: float


@dataclass(frozen=True)
class StopGeneration:
    """Kill all workers of this generation at once, and report when they have ended."""

    agent: str
    generation: int


@dataclass(frozen=True)
class Finish:
    """The run is over with this exit code; agents may end."""

    code: int
    cause: Failure | None = None
    why: str = ""
    about: RunCause = RunCause.OTHER


@dataclass(frozen=True)
class Wait:
    """Pause before the next start, because the last starts failed immediately."""

    seconds: float


@dataclass(frozen=True)
class Exclude:
    """End this agent. Do not use its node until the node is repaired (`until_repaired`), or for the rest of the run."""

    agent: str
    why: str = "was the first to fail twice in a row"
    until_repaired: bool = False


@dataclass(frozen=True)
class ReleaseNodes:
    """Release the nodes, which have no workers any more, and request others."""


Order = OpenStore | Start | SaveGeneration | StopGeneration | Finish | Wait | Exclude | ReleaseNodes
