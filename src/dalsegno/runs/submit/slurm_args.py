"""The steps inside a run's allocation, as argument lists for srun."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.submit.container import container_words, guarded, launcher_inside
from dalsegno.runs.submit.plan import RunPlan, salloc_argv, slurm_options
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


# ---- The batch script of a run whose coordinator has no head node to live on.


# Every line of a script that starts so may be an option to sbatch, so nothing of a user's may come before them.
_MARK = "#SBATCH"
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+&|*()!~^\[\]-]*", re.ASCII)
# sbatch blanks these two words out wherever they stand in a line.
_BLANKED = re.compile(r"(het|pack)(job)", re.IGNORECASE)


def render_sbatch(plan: RunPlan) -> str:
    """The script for `sbatch`."""
    lines = ["#!/bin/bash", f"# Run {plan.run}, by Dal Segno. `dalsegno runs` tells how it fares."]
    options = [*slurm_options(plan.job), *_batch_options(plan)]
    lines += [f"{_MARK} {sbatch_word(option)}" for option in options]
    lines += ["", f"exec {shlex.join(coordinator_argv(plan))}"]
    return "\n".join(lines) + "\n"


def render_commands(plan: RunPlan) -> str:
    """What `--dry-run` shows: how the job is asked for, and the step in it."""
    srun, *rest = step_argv(plan)
    if plan.on_head:
        return f"{shlex.join(salloc_argv(plan))}\n{shlex.join([srun, '--jobid=JOB', *rest])}\n"
    return f"{render_sbatch(plan)}\n# The coordinator starts in it:\n# {shlex.join([srun, *rest])}\n"


def _batch_options(plan: RunPlan) -> list[str]:
    folder = RunFolder(Path(plan.folder.replace("%", "%%")))
    return [
        "--no-kill",
        "--requeue",  # preempted, it waits in the queue and goes on
        "--open-mode=append",  # and keeps what it has said so far
        f"--output={folder.job_log}",
        *([f"--chdir={plan.request.chdir}"] if plan.request.chdir else []),
    ]


def sbatch_word(word: str) -> str:
    """One word of a #SBATCH line. sbatch's own reader knows quotes, but inside them `\\` still escapes."""
    if _PLAIN.fullmatch(word) and not _BLANKED.search(word):
        return word
    if not word.isprintable():
        what = f"{word!r:.60} cannot stand in a batch script"
        raise DalsegnoError(what, hint="a path or value with a line break or another control character: leave that out")
    escaped = re.sub(r'(["\\#])', r"\\\1", word)
    return '"' + _BLANKED.sub(r"\1\\\2", escaped) + '"'
