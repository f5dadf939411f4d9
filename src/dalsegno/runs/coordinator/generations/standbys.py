"""Decide when agents prepare standby workers, which replace killed GPU workers without starting CUDA and NCCL again.

They are prepared after the first steps, so that they do not slow the start down. Spare nodes prepare them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.wire.frames import Message

FIRST_STEPS = 3  # number of steps that a generation completes before its agents prepare standbys
WARM_UP_S = 10.0  # age of a generation at which its agents prepare standbys even without reported steps


class StandbyMode(Enum):
    """Whether standby workers are prepared for a run."""

    AUTO = "auto"  # prepared if the workers use GPUs
    OFF = "0"
    ON = "1"  # prepared also without GPUs, where a standby saves only the fork


@dataclass(frozen=True)
class GpuUse:
    """How the script uses its GPUs, as a worker reported it when it started CUDA or created a process group."""

    changes: Mapping[str, str | None] = field(default_factory=dict)  # settings that the script changed; None: removed
    backend: str = ""  # "nccl" if the script has a process group with this backend
    unfit: str = ""  # why a standby cannot replace the script's workers; "" if it can


@dataclass(frozen=True)
class StandbyReady:
    """A standby worker is ready and holds this much memory of its GPU; None if that is unknown."""

    mib: int | None


class StandbyPlan:
    """The standby workers of a run: how workers use their GPUs, and which agents have been told to prepare."""

    def __init__(self, mode: StandbyMode) -> None:
        self._mode = mode
        self._use: GpuUse | None = None
        self._generation, self._steps = 0, 0
        self._newest = -1
        self._ordered: set[str] = set()
        self._told = False

    def record_step(self, generation: int, step: int) -> None:
        self._follow(generation)
        if step > self._newest:
            self._newest, self._steps = step, self._steps + 1

    def record(self, message: GpuUse | StandbyReady) -> str:
        """Record an agent's message. Return a line for the user, or "" if there is nothing new to report."""
        return self._record_use(message) if isinstance(message, GpuUse) else self._record_ready(message)

    def _record_use(self, use: GpuUse) -> str:
        known, self._use = self._use, use
        fit = self._mode is StandbyMode.OFF or not use.unfit or (known is not None and bool(known.unfit))
        return "" if fit else f"no standby workers: {use.unfit}"

    def _record_ready(self, ready: StandbyReady) -> str:
        """Return a line for the user when the first standby of the run is ready; else ""."""
        if self._told or not ready.mib:
            return ""
        self._told = True
        return f"standby workers are ready; each holds about {ready.mib} MiB of its GPU's memory"

    def due(self, run: Run, age_s: float) -> list[str]:
        """Return the agents that should prepare standbys now. Each agent gets the order once per generation."""
        self._follow(run.generation)
        if run.phase is not GenerationPhase.RUNNING or not self._wanted():
            return []
        if self._steps < FIRST_STEPS and age_s < WARM_UP_S:
            return []
        self._ordered.intersection_update(run.ready)  # an agent that was lost and has reconnected gets the order again
        agents = [agent for agent in run.ready if agent not in self._ordered]
        self._ordered.update(agents)
        return agents

    def _wanted(self) -> bool:
        if self._use is None:
            return self._mode is StandbyMode.ON
        return self._mode is not StandbyMode.OFF and not self._use.unfit

    def _follow(self, generation: int) -> None:
        if generation > self._generation:
            self._generation, self._steps, self._newest = generation, 0, -1
            self._ordered.clear()

    def message(self, envs: list[dict[str, str]]) -> Message:
        """Return the order to an agent. `envs` are the environments of its local ranks."""
        use = self._use or GpuUse()
        gpu = self._use is not None
        return {"standby": {"envs": envs, "gpu": gpu, "backend": use.backend, "changes": dict(use.changes)}}
