"""Decide when agents prepare standby workers, which replace killed GPU workers without starting CUDA and NCCL again.

Standby workers are prepared after the first steps, so that they do not slow down the start. Spare nodes prepare them
too. For a script that reports no steps, they are prepared some time after it has started CUDA and its process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.runs.coordinator.generations.generations import GenerationPhase, Run
from dalsegno.wire.frames import Message

FIRST_STEPS = 3  # number of steps that a generation completes before its agents prepare standbys
WARM_UP_S = 10.0  # time after the start of CUDA and process groups, if the script reports no steps
LATE_FIRST_STEPS_S = 600.0  # the same if the script can report steps but has not done so yet


class StandbyMode(Enum):
    """Whether standby workers are prepared for a run."""

    AUTO = "auto"  # prepared if the workers use GPUs
    OFF = "0"
    ON = "1"  # prepared also without GPUs, where a standby saves only the fork


@dataclass(frozen=True)
class GpuUse:
    """The script's use of GPUs, as a worker reported it when it started CUDA or created a process group."""

    changes: Mapping[str, str | None] = field(default_factory=dict)  # settings that the script changed; None if removed
    backend: str = ""  # "nccl" if the script has a process group with this backend
    unfit: str = ""  # why a standby cannot replace the script's workers; "" if it can
    reporter: bool = False  # whether the script has imported a module that reports steps


@dataclass(frozen=True)
class StandbyReady:
    """A standby worker is ready and holds this much memory of its GPU; None if that is unknown."""

    mib: int | None


@dataclass(frozen=True)
class StandbyLost:
    """One or all standby workers of a node cannot be used; `text` says which, and why."""

    text: str
    local_rank: int | None = None  # the standby worker that ended; None if the node prepares no more in this run


class StandbyPlan:
    """The standby workers of a run: how workers use their GPUs, and which agents have the order to prepare them."""

    def __init__(self, mode: StandbyMode) -> None:
        self._mode = mode
        self._use: GpuUse | None = None
        self._generation, self._steps = 0, 0
        self._newest = -1
        self._has_reported = False  # whether the script has reported a step in any generation
        self._used_at_s: float | None = None  # age of the generation when its workers last started CUDA or a group
        self._ordered: set[str] = set()
        self._told = self._told_unfit = False
        self._refused: set[str] = set()  # nodes that prepare no more standbys

    def record_step(self, generation: int, step: int) -> None:
        self._follow(generation)
        self._has_reported = True
        if step > self._newest:
            self._newest, self._steps = step, self._steps + 1

    def record(self, message: GpuUse | StandbyReady | StandbyLost, node: str, generation: int, age_s: float) -> str:
        """Record a node's message at this age of the generation.

        Return a line for the user, or "" if there is nothing new to report.
        """
        if isinstance(message, StandbyLost):
            return self._record_lost(message, node)
        self._follow(generation)
        return self._record_use(message, age_s) if isinstance(message, GpuUse) else self._record_ready(message)

    def _record_lost(self, lost: StandbyLost, node: str) -> str:
        """Return a line for every standby that ended, but only one line for a node that prepares no more."""
        told = lost.local_rank is None and node in self._refused
        if lost.local_rank is None:
            self._refused.add(node)
        return "" if told else f"{node}: {lost.text}"

    def _record_use(self, use: GpuUse, age_s: float) -> str:
        self._used_at_s = age_s
        self._use = use
        if self._mode is StandbyMode.OFF or not use.unfit or self._told_unfit:
            return ""
        self._told_unfit = True
        return f"no standby workers: {use.unfit}"

    def _record_ready(self, ready: StandbyReady) -> str:
        """Return a line for the user when the first standby of the run is ready, otherwise ""."""
        if self._told or not ready.mib:
            return ""
        self._told = True
        return f"standby workers are ready; each holds about {ready.mib} MiB of its GPU's memory"

    def due(self, run: Run, age_s: float) -> list[str]:
        """Return the agents that should prepare standbys now. Each agent gets the order once per generation."""
        self._follow(run.generation)
        if run.phase is not GenerationPhase.RUNNING or not self._wanted():
            return []
        if self._steps < FIRST_STEPS and not self._has_settled(age_s):
            return []
        self._ordered.intersection_update(run.ready)  # an agent that was lost and has reconnected gets the order again
        agents = [agent for agent in run.ready if agent not in self._ordered]
        self._ordered.update(agents)
        return agents

    def _has_settled(self, age_s: float) -> bool:
        """Return whether the start is over, as far as this can be known without reported steps.

        A script that has reported steps before will do so again. Loading the data may take long, so the time for other
        scripts begins with the last start of CUDA or of a process group in this generation.
        """
        if self._has_reported:
            return False
        if self._use is None:
            return age_s >= WARM_UP_S
        if self._used_at_s is None:
            return False
        return age_s - self._used_at_s >= (LATE_FIRST_STEPS_S if self._use.reporter else WARM_UP_S)

    def _wanted(self) -> bool:
        if self._use is None:
            return self._mode is StandbyMode.ON
        return self._mode is not StandbyMode.OFF and not self._use.unfit

    def _follow(self, generation: int) -> None:
        if generation > self._generation:
            self._generation, self._steps, self._newest = generation, 0, -1
            self._used_at_s = None
            self._ordered.clear()

    def message(self, envs: list[dict[str, str]]) -> Message:
        """Return the order to an agent. `envs` are the environments of its local ranks."""
        use = self._use or GpuUse()
        gpu = self._use is not None
        return {"standby": {"envs": envs, "gpu": gpu, "backend": use.backend, "changes": dict(use.changes)}}
