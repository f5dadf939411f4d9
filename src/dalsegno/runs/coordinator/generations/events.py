"""The events and orders of a run's state machine, as plain values."""

from __future__ import annotations

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
    """An agent is gone: its connection broke, or its host no longer answers."""

    agent: str


@dataclass(frozen=True)
class StoreOpened:
    agent: str
    generation: int
    port: int


@dataclass(frozen=True)
class WorkerEnded:
    """A worker ended by itself. As in Python, `code` is negative for a signal."""

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
    """The generation hangs: it has completed no step for too long."""

    generation: int
    why: str
    age_s: float = 0.0


@dataclass(frozen=True)
class PauseOver:
    """The pause before the next start is over."""


@dataclass(frozen=True)
class NodesReclaimed:
    """Slurm is about to reclaim the nodes (time limit or preemption). Workers have been signalled to save and exit."""


@dataclass(frozen=True)
class RunMoved:
    """The old nodes are released; agents that join from now on belong to another job."""


@dataclass(frozen=True)
class Cancelled:
    """The user cancelled the run."""


@dataclass(frozen=True)
class GatherTimeout:
    """The time to wait for more nodes than the minimum is over."""


@dataclass(frozen=True)
class NodesOutOfService:
    """All nodes that are out of service. Workers there may continue; new workers start there only if necessary."""

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
    | RunMoved
    | Cancelled
    | GatherTimeout
    | NodesOutOfService
)
# Agents report these events again to the next coordinator, or show them by their absence. Other events, such as a
# cancellation, are reported only once.
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
class StopGeneration:
    """Kill all workers of this generation at once, and report when they are gone."""

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
    """End this agent and stop using its node: until it is repaired if `until_repaired` is set, otherwise for good."""

    agent: str
    why: str = "was the first to fail twice in a row"
    until_repaired: bool = False


@dataclass(frozen=True)
class ReleaseNodes:
    """Release the nodes, where no workers are left, and request others."""


Order = OpenStore | Start | StopGeneration | Finish | Wait | Exclude | ReleaseNodes
