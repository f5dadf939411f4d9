"""What a remark about a node is about, so that nobody has to read its text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Topic(Enum):
    """The subjects of remarks that something depends on."""

    OTHER = ""
    AGENT_SILENT = "agent-silent"
    AGENT_DEAD = "agent-dead"
    QUICK_FAILURES = "quick-failures"
    SLURM_DRAIN = "slurm-drain"  # Slurm itself has taken the node out of service

    @classmethod
    def _missing_(cls, value: object) -> Topic:
        return cls.OTHER


@dataclass(frozen=True)
class Subject:
    """One remark's topic, and what tells two remarks on the same topic apart."""

    topic: Topic = Topic.OTHER
    network: bool = False  # the last report warned of the network
    count: int = 0  # of jobs that failed


ANYTHING = Subject()
SLURM_DRAIN = Subject(Topic.SLURM_DRAIN)
