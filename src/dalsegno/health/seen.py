"""What earlier looks have found: trends, processes that still wait, ports that went down. Lost with the process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dalsegno.health.facts import LogLine

MOST_LINES = 2000
MOST_SAMPLES = 240


@dataclass(frozen=True)
class Sample:
    """A temperature at a time."""

    at: float
    celsius: float


@dataclass(frozen=True)
class Sent:
    """TCP segments since boot, and those that had to be sent again."""

    at: float
    segments: int
    again: int


@dataclass(frozen=True)
class Waiting:
    """A process in one state since a time, without having run meanwhile."""

    pid: int
    name: str
    state: str  # D or Z
    since: float
    switches: str = ""  # context switches: a process that has run has another number


@dataclass
class Seen:
    since: float = 0.0  # what the log says of before is mended: set it when the GPUs were reset
    log: deque[LogLine] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    heat: dict[str, deque[Sample]] = field(default_factory=dict)  # by a GPU's uuid
    waiting: dict[tuple[int, str], Waiting] = field(default_factory=dict)  # by pid and start time
    downs: dict[str, int] = field(default_factory=dict)  # link_downed by port
    flaps: dict[str, tuple[float, ...]] = field(default_factory=dict)
    sent: deque[Sent] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    active: set[str] = field(default_factory=set)  # ports that once were up, and so should be
    displays: dict[str, bool] = field(default_factory=dict)  # by a device's folder: whether it is a GPU of NVIDIA's

    def heat_of(self, uuid: str) -> deque[Sample]:
        return self.heat.setdefault(uuid, deque(maxlen=MOST_SAMPLES))
