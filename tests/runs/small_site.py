"""A run without Slurm or a framework: plain scripts, and agents that the test starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.standbys import StandbyMode
from dalsegno.runs.coordinator.site import GenerationLayout, NodeEnv
from dalsegno.runs.folder import RunFolder
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.processes import LocalRunner
from dalsegno.train.contract import RUN
from dalsegno.wire.frames import Message


@dataclass(frozen=True)
class SmallSite:
    """A minimal `CoordinatorSite`."""

    folder: RunFolder
    shape: Shape = field(default_factory=lambda: Shape(1, 1, 1))
    max_restarts: int = 3
    script: str = "train.py"
    args: tuple[str, ...] = ()
    python: str = sys.executable
    modules: tuple[str, ...] = ("json",)
    timing: Timing = field(default_factory=lambda: Timing(1.5))
    hang_timeout_s: float | None = 0
    standby: StandbyMode = StandbyMode.AUTO
    name: str = "train"
    own_job: int | None = None
    spares: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    workers_env: Mapping[str, str] = field(default_factory=dict)
    folder_is_shared: bool = True  # whether the agents can access the run folder

    @property
    def slurm(self) -> SlurmClient:
        return SlurmClient(LocalRunner(), self.environment)

    def setup(self) -> Message:
        folder = self.folder.root if self.folder_is_shared else "/no/such/folder"
        return {
            "python": self.python, "modules": list(self.modules), "script": self.script, "args": list(self.args),
            "module": False, "is_python": True, "cwd": "/", "folder": str(folder), "store": False,
            "env": {RUN: self.folder.run}, "gone_s": self.timing.gone_s, "absence_s": 20.0,
        }  # fmt: skip

    def node_env(self, seats: GenerationLayout, group_rank: int, found: Mapping[str, str]) -> NodeEnv:
        world_size, first = len(seats.hosts) * seats.nproc_per_node, group_rank * seats.nproc_per_node
        common = {"WORLD_SIZE": str(world_size), "RESTARTS": str(seats.restarts), **found, **self.workers_env}
        return NodeEnv(common, tuple({"RANK": str(first + local)} for local in range(seats.nproc_per_node)))

    def allocation(self, role: JobRole, suspects: Sequence[str], members: Sequence[str]) -> list[str]:
        raise AssertionError("nothing is asked of Slurm")

    def step(self, job: int, nodes: Sequence[str]) -> list[str]:
        raise AssertionError("nothing is asked of Slurm")
