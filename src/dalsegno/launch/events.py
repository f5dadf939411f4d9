"""What happens to a run, and what its coordinator orders: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.launch.group import Group


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


@dataclass(frozen=True)
class Stopped:
    """An agent has killed what it ran for this generation."""

    agent: str
    generation: int


@dataclass(frozen=True)
class Cancelled:
    """The user does not want the run any more."""


@dataclass(frozen=True)
class GaveUpWaiting:
    """The time to wait for more nodes than the least is over."""


Event = Joined | Left | StoreOpened | WorkerEnded | Stopped | Cancelled | GaveUpWaiting


@dataclass(frozen=True)
class OpenStore:
    """Open the store's listening socket for this generation and say on which port."""

    agent: str
    generation: int


@dataclass(frozen=True)
class Start:
    """Fork the workers of this generation."""

    agent: str
    group: Group
    store_port: int
    restarts: int


@dataclass(frozen=True)
class Stop:
    """Kill all workers of this generation at once, and say when they are gone."""

    agent: str
    generation: int


@dataclass(frozen=True)
class Finish:
    """The run is over with this exit code; agents may go."""

    code: int


Order = OpenStore | Start | Stop | Finish
