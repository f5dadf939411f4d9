"""What happens to a run, and what its coordinator orders: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.runs.coordinator.causes import Failure
from dalsegno.runs.coordinator.group import Members
from dalsegno.runs.status import RunCause


@dataclass(frozen=True)
class Joined:
    """An agent has connected and its warm parent is ready."""

    agent: str


@dataclass(frozen=True)
class Left:
    """An agent is gone: its connection broke, or its host no longer answers."""

    agent: str


@dataclass(frozen=True)
class StoreOpened:
    agent: str
    generation: int
    port: int


@dataclass(frozen=True)
class WorkerEnded:
    """A worker ended by itself. `code` is negative for a signal, as Python has it."""

    agent: str
    generation: int
    rank: int
    code: int
    failure: Failure | None = None  # what is known of an end that was not well
    age_s: float = 0.0  # how long the generation has run


@dataclass(frozen=True)
class GenerationStopped:
    """An agent has killed what it ran for this generation; some had already failed, and only not ended yet."""

    agent: str
    generation: int
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Hung:
    """No step for too long: the generation is as good as dead."""

    generation: int
    why: str
    age_s: float = 0.0


@dataclass(frozen=True)
class Waited:
    """The pause before the next start is over."""


@dataclass(frozen=True)
class Leaving:
    """The nodes are needed back (time limit, preemption): workers were told to save and end."""


@dataclass(frozen=True)
class RunMoved:
    """The old nodes are given back; agents that join from now on are those of another job."""


@dataclass(frozen=True)
class Cancelled:
    """The user does not want the run any more."""


@dataclass(frozen=True)
class GaveUpWaiting:
    """The time to wait for more nodes than the least is over."""


@dataclass(frozen=True)
class Doubted:
    """These nodes are out of service, all of them: who runs there may run on, and nobody new begins if others can."""

    nodes: frozenset[str]


Event = (
    Joined
    | Left
    | StoreOpened
    | WorkerEnded
    | GenerationStopped
    | Hung
    | Waited
    | Leaving
    | RunMoved
    | Cancelled
    | GaveUpWaiting
    | Doubted
)


@dataclass(frozen=True)
class OpenStore:
    """Open the store's listening socket for this generation and say on which port."""

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
    """Kill all workers of this generation at once, and say when they are gone."""

    agent: str
    generation: int


@dataclass(frozen=True)
class Finish:
    """The run is over with this exit code; agents may go."""

    code: int
    cause: Failure | None = None
    why: str = ""
    about: RunCause = RunCause.OTHER


@dataclass(frozen=True)
class Wait:
    """Pause before the next start: the last ones failed at once."""

    seconds: float


@dataclass(frozen=True)
class Exclude:
    """Send this agent away, and do not take its node again; or, where Slurm has it out of service, not until it is
    mended."""

    agent: str
    why: str = "was the first to fail twice running"
    until_mended: bool = False


@dataclass(frozen=True)
class ReleaseNodes:
    """Nothing runs any more: give the nodes back, and ask for others."""


Order = OpenStore | Start | StopGeneration | Finish | Wait | Exclude | ReleaseNodes
