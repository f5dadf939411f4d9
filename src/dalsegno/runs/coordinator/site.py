"""What a coordinator has to know of its run and its Slurm; the room above, which knows the options, gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.group import Shape
from dalsegno.runs.coordinator.liveness import Timing
from dalsegno.runs.folder import RunFolder
from dalsegno.slurm.client import SlurmClient
from dalsegno.wire.frames import Message


@dataclass(frozen=True)
class Seats:
    """A generation as its workers' variables tell it: hosts by group rank, and where its store listens."""

    generation: int
    hosts: tuple[str, ...]
    nproc_per_node: int
    port: int
    restarts: int


class RunTerms(Protocol):
    """One run, asked for and planned: what every coordinator has to know."""

    @property
    def folder(self) -> RunFolder: ...

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> Shape: ...

    @property
    def max_restarts(self) -> int: ...

    @property
    def timing(self) -> Timing: ...

    @property
    def hang_timeout_s(self) -> float | None:
        """0: never; None: from the steps that are reported."""
        ...

    @property
    def own_job(self) -> int | None:
        """The job whose batch step the coordinator lives in; None on the head, where it asks for its jobs itself."""
        ...

    def setup(self) -> Message:
        """What an agent has to know before anything starts."""
        ...

    def worker_env(self, seats: Seats, rank: int, found: Mapping[str, str]) -> dict[str, str]:
        """The variables of one worker; `found` are some that its agent found in its own environment."""
        ...


class CoordinatorSite(RunTerms, Protocol):
    """And what one has to know that asks Slurm for its agents."""

    @property
    def slurm(self) -> SlurmClient: ...

    @property
    def spares(self) -> int:
        """Nodes beyond those of the run's shape that are to wait for a lost one's rank."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """Of salloc and srun, and so of the agents."""
        ...

    def allocation(self, role: JobRole, suspects: Sequence[str], members: Sequence[str]) -> list[str]:
        """Return the salloc for a job of this role."""
        ...

    def step(self, job: int, nodes: Sequence[str]) -> list[str]:
        """The srun that starts agents on these nodes of a job."""
        ...


# ---- How often whoever looks after a run does so.


CHECK_S = 0.5  # its folder, its nodes, its steps
ASK_SLURM_S = 5.0  # what it did without telling
REFRESH_S = 10.0  # a status is written again, though nothing has changed: whoever reads it sees that we live
