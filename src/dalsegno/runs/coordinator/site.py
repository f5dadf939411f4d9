"""The interfaces that give a coordinator access to its run and to Slurm. `runs.submit` implements both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.standbys import StandbyMode
from dalsegno.runs.folder import RunFolder
from dalsegno.slurm.client import SlurmClient
from dalsegno.wire.frames import Message


@dataclass(frozen=True)
class GenerationLayout:
    """Values for the environment of a generation's workers.

    `hosts` is in group rank order; `port` is the store's port.
    """

    generation: int
    hosts: tuple[str, ...]
    nproc_per_node: int
    port: int
    restarts: int


@dataclass(frozen=True)
class NodeEnv:
    """The environment variables of a node's workers: those that all workers share, and those of each worker."""

    common: Mapping[str, str]
    own: tuple[Mapping[str, str], ...]  # the variables of each worker alone, by local rank

    @classmethod
    def empty(cls, workers: int) -> NodeEnv:
        return cls({}, ({},) * workers)

    def with_common(self, more: Mapping[str, str]) -> NodeEnv:
        """Return a copy with more variables for all workers. They override the variables of a single worker."""
        if not more:
            return self
        own = tuple(
            each if each.keys().isdisjoint(more) else {name: each[name] for name in each if name not in more}
            for each in self.own
        )
        return NodeEnv({**self.common, **more}, own)

    def whole(self) -> list[dict[str, str]]:
        """Return the complete environment of each worker."""
        return [{**self.common, **each} for each in self.own]


class RunTerms(Protocol):
    """The properties of a run that every coordinator needs."""

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
        """The number of seconds without a step that counts as a hang.

        0 means never; None means derived from reported steps.
        """
        ...

    @property
    def standby(self) -> StandbyMode:
        """Whether agents prepare standby workers."""
        ...

    @property
    def own_job(self) -> int | None:
        """The job whose batch step runs the coordinator; None if the coordinator runs on the head node."""
        ...

    def setup(self) -> Message:
        """Return the `setup` message, which an agent needs before it starts any process."""
        ...

    def node_env(self, layout: GenerationLayout, group_rank: int, found: Mapping[str, str]) -> NodeEnv:
        """Return the environment variables of a node's workers.

        `found` contains variables from the agent's environment.
        """
        ...


class CoordinatorSite(RunTerms, Protocol):
    """The additional properties for a coordinator that requests its nodes from Slurm."""

    @property
    def slurm(self) -> SlurmClient: ...

    @property
    def spares(self) -> int:
        """The number of extra nodes that wait to replace lost nodes."""
        ...

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment for salloc and srun, which the agents inherit."""
        ...

    def allocation(self, role: JobRole, suspects: Sequence[str], members: Sequence[str]) -> list[str]:
        """Return the salloc command for a job of this role."""
        ...

    def step(self, job: int, nodes: Sequence[str]) -> list[str]:
        """Return the srun command that starts agents on these nodes of a job."""
        ...


# Intervals of the coordinator's checks


CHECK_S = 0.5  # interval between checks of the run's folder, nodes and steps
ASK_SLURM_S = 5.0  # interval between queries to Slurm for changed jobs and nodes
REFRESH_S = 10.0  # interval at which an unchanged status is rewritten, to show that the coordinator is alive
