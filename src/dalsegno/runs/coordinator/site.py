"""The interface through which a coordinator knows its run and its Slurm. `runs.submit` implements it."""

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
class GenerationLayout:
    """A generation as its workers' variables describe it: hosts by group rank, and where its store listens."""

    generation: int
    hosts: tuple[str, ...]
    nproc_per_node: int
    port: int
    restarts: int


class RunTerms(Protocol):
    """What every coordinator needs to know about its run."""

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
        """Seconds without a step that count as a hang. 0: never; None: derived from the reported steps."""
        ...

    @property
    def own_job(self) -> int | None:
        """The job whose batch step runs the coordinator; None on the head node, where it submits its jobs itself."""
        ...

    def setup(self) -> Message:
        """Return what an agent needs before anything starts."""
        ...

    def worker_env(self, seats: GenerationLayout, rank: int, found: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of one worker. `found` are variables of its agent's own environment."""
        ...


class CoordinatorSite(RunTerms, Protocol):
    """What a coordinator needs in addition if it requests its nodes from Slurm."""

    @property
    def slurm(self) -> SlurmClient: ...

    @property
    def spares(self) -> int:
        """Nodes beyond the run's shape that wait to replace a lost one."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment of salloc and srun, and so of the agents."""
        ...

    def allocation(self, role: JobRole, suspects: Sequence[str], members: Sequence[str]) -> list[str]:
        """Return the salloc command for a job of this role."""
        ...

    def step(self, job: int, nodes: Sequence[str]) -> list[str]:
        """Return the srun command that starts agents on these nodes of a job."""
        ...


# Intervals


CHECK_S = 0.5  # between checks of the run's folder, nodes and steps
ASK_SLURM_S = 5.0  # between queries for changes that Slurm does not announce
REFRESH_S = 10.0  # an unchanged status is rewritten after this time, so that readers see that the coordinator is alive
