"""The coordinator's view of a planned run: its Slurm commands, and the setup of its agents and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dalsegno.runs.comment import JobRole
from dalsegno.runs.coordinator.agents.liveness import Timing
from dalsegno.runs.coordinator.generations.group import Shape
from dalsegno.runs.coordinator.generations.standbys import StandbyMode
from dalsegno.runs.coordinator.site import GenerationLayout, NodeEnv
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.submit.frameworks import ProcessLayout, framework_env, torch_threads
from dalsegno.runs.submit.plan import RunPlan, plan_join, plan_next, salloc_argv
from dalsegno.runs.submit.slurm_args import step_argv
from dalsegno.slurm.client import SlurmClient
from dalsegno.train.contract import FRESH, RUN, VERIFY_EVERY
from dalsegno.wire.frames import Message

TORCH_MODULES = ("torch", "torch.distributed", "torch._dynamo")
COORDINATOR_TIMEOUT = "DALSEGNO_COORDINATOR_TIMEOUT"  # value in whole seconds; if unset, agents use their default


@dataclass(frozen=True)
class RunSite:
    """The `CoordinatorSite` of a planned run."""

    folder: RunFolder
    plan: RunPlan
    environment: Mapping[str, str]
    slurm: SlurmClient
    own_job: int | None = None
    timing: Timing = field(default_factory=Timing)

    @property
    def name(self) -> str:
        return self.plan.request.label

    @property
    def shape(self) -> Shape:
        return self.plan.shape

    @property
    def spares(self) -> int:
        return self.plan.request.spares

    @property
    def max_restarts(self) -> int:
        return self.plan.request.max_restarts

    @property
    def hang_timeout_s(self) -> float | None:
        return self.plan.request.hang_timeout_s

    @property
    def standby(self) -> StandbyMode:
        return StandbyMode(self.plan.request.standby)

    def setup(self) -> Message:
        request = self.plan.request
        is_python = request.script.endswith(".py")
        modules = self._modules() if is_python and not request.no_preload else ()
        return {
            "python": self.plan.python,
            "modules": list(modules),
            "script": request.script,
            "args": list(request.args),
            "module": False,
            "is_python": is_python,
            "cwd": request.chdir or "/",
            "folder": str(self.folder.root),
            "store": request.framework == "torch",
            "env": self._setup_env(),
            "gone_s": self.timing.gone_s,
            **self._absence(),
            "last_word": self._final_command(),
        }

    def _absence(self) -> Message:
        value = self.environment.get(COORDINATOR_TIMEOUT, "")
        return {"absence_s": float(value)} if value.isdigit() else {}

    def _final_command(self) -> list[str]:
        """Return the command that requeues the job.

        Agents run it if the batch step's host has died and the coordinator does not return.
        """
        return ["scontrol", "requeue", str(self.own_job)] if self.own_job else []

    def _modules(self) -> tuple[str, ...]:
        """Return the modules that the warm parent imports: torch, if it is the framework, and those in `preload`."""
        own = TORCH_MODULES if self.plan.request.framework == "torch" else ()
        return (*own, *self.plan.request.preload)

    def _setup_env(self) -> dict[str, str]:
        """Return the variables that the warm parent and all workers get. torch reads some of them on import."""
        is_torch = self.plan.request.framework == "torch"
        nproc = self.shape.nproc_per_node
        threads = torch_threads(nproc, self._cpus_per_process(nproc), self.environment) if is_torch else {}
        request = self.plan.request
        verify = {VERIFY_EVERY: str(request.verify_every)} if request.verify_every else {}
        return {RUN: self.folder.run, **threads, **verify, **({FRESH: "1"} if request.fresh else {})}

    def _cpus_per_process(self, nproc: int) -> int:
        """Return the CPUs per process; 0 if unknown. An agent's task has the CPUs of all processes on its node."""
        return max(1, self.plan.job.cpus_per_task // nproc) if self.plan.request.has_agents else 0

    def node_env(self, layout: GenerationLayout, group_rank: int, found: Mapping[str, str]) -> NodeEnv:
        world = ProcessLayout(
            run=self.folder.run,
            hosts=layout.hosts,
            nproc_per_node=layout.nproc_per_node,
            port=layout.port,
            restarts=layout.restarts,
            max_restarts=self.max_restarts,
            gpus_per_node=self.plan.request.gpus_per_node.count,
            cpus_per_process=self._cpus_per_process(layout.nproc_per_node),
        )
        return framework_env(self.plan.request.framework, world, group_rank, found)

    def allocation(self, role: JobRole, suspects: Sequence[str], members: Sequence[str]) -> list[str]:
        if role is JobRole.JOIN:
            return salloc_argv(plan_join(self.plan, suspects=suspects, members=members))
        return salloc_argv(plan_next(self.plan, suspects) if role is JobRole.NEXT else self.plan)

    def step(self, job: int, nodes: Sequence[str]) -> list[str]:
        """Return the srun command.

        If there are no agents, the command saves srun's exit code to a file for a restarted coordinator.
        """
        argv = step_argv(self.plan, job, nodes)
        if self.plan.request.has_agents:
            return argv
        return ["/bin/sh", "-c", '"$@"; echo $? >"$0"', str(self.folder.exit_code), *argv]
