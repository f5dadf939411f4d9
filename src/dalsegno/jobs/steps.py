"""The steps inside a run's allocation, as argument lists for srun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dalsegno.jobs.container import container_words, guarded, launcher_inside
from dalsegno.jobs.plan import RunPlan
from dalsegno.launch.folder import RunFolder
from dalsegno.slurm.names import job_id, node_list


def step_argv(plan: RunPlan, job: int | str | None = None, nodes: Sequence[str] = ()) -> list[str]:
    """What starts the run's processes: the agents, or for mpi and plain the processes themselves.

    `job` is for one who calls from outside the job; `nodes` for a job that has lost some since it was asked for.
    """
    return agents_argv(plan, job, nodes) if plan.request.has_agents else tasks_argv(plan, job, nodes)


def agents_argv(plan: RunPlan, job: int | str | None = None, nodes: Sequence[str] = ()) -> list[str]:
    """One run agent on each node. The run's secret goes through srun's stdin: arguments can be read by all.

    Neither `--cpus-per-task` (it implies `--exact`) nor GPUs: a step has all of its job's unless told otherwise.
    """
    return [
        *_srun(plan, job, nodes, tasks_per_node=1),
        "--no-kill",  # the allocation's own does not reach its steps
        "--kill-on-bad-exit=0",
        "--overlap",  # the step of an srun that died holds its resources some seconds longer
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",  # whatever an sbatch around us was told to export
        "--input=all",
        *agent_argv(plan),
    ]


def tasks_argv(plan: RunPlan, job: int | str | None = None, nodes: Sequence[str] = ()) -> list[str]:
    """The run's processes as srun's own tasks: Slurm's variables, or an MPI that asks srun for its peers."""
    return [
        *_srun(plan, job, nodes, tasks_per_node=plan.shape.nproc_per_node),
        f"--cpus-per-task={plan.job.cpus_per_task}",
        "--kill-on-bad-exit=1",  # the others would wait for it for ever
        f"--mpi={plan.mpi or 'none'}",
        "--export=ALL",
        "--input=none",
        "--open-mode=append",  # preempted, it is started again, and keeps what it has said
        f"--output={RunFolder(Path(plan.folder.replace('%', '%%'))).generation(1) / 'rank%t.log'}",
        *guarded(plan.request, plan.launcher, program_argv(plan)),
    ]


def agent_argv(plan: RunPlan) -> list[str]:
    """The run agent itself. What it is to run, its coordinator tells it."""
    return [*launcher_inside(plan.request, plan.launcher), "run-agent", plan.run]


def coordinator_argv(plan: RunPlan) -> list[str]:
    """The coordinator: all it has to know is in the run's folder."""
    return [*plan.launcher, "run-coordinator", plan.folder]


def program_argv(plan: RunPlan) -> list[str]:
    """The user's own program and arguments: a Python script as `python -u` would run it, else as it is."""
    request = plan.request
    python = [plan.python, "-u"] if request.script.endswith(".py") else []
    return [*python, request.script, *request.args]


def _srun(plan: RunPlan, job: int | str | None, nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    return [
        "srun",
        *([f"--jobid={job_id(job)}"] if job is not None else []),
        *_where(nodes, tasks_per_node),
        f"--ntasks-per-node={tasks_per_node}",
        f"--job-name={plan.run}",
        *([f"--chdir={plan.request.chdir}"] if plan.request.chdir else []),
        *container_words(plan.request, plan.folder, plan.launcher),
    ]


def _where(nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    """Named nodes: from outside, srun does not know how many there are, and inside it still counts those it lost."""
    if not nodes:
        return []
    tasks = len(nodes) * tasks_per_node
    return [f"--nodes={len(nodes)}", f"--ntasks={tasks}", f"--nodelist={node_list(nodes)}"]
