"""Render the srun commands and the batch script of a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.runs.folder import RunFolder
from dalsegno.runs.submit.container import container_options, launcher_inside, wrap_guard
from dalsegno.runs.submit.plan import RunPlan, salloc_argv, slurm_options
from dalsegno.slurm.names import job_id, node_list


def step_argv(plan: RunPlan, job: int | str | None = None, nodes: Sequence[str] = ()) -> list[str]:
    """Return the command that starts the run's agents or, for mpi and plain, its processes.

    `job` is required if srun runs outside the job. `nodes` selects nodes, for example after the job has lost some.
    """
    return agents_argv(plan, job, nodes) if plan.request.has_agents else tasks_argv(plan, job, nodes)


def agents_argv(plan: RunPlan, job: int | str | None = None, nodes: Sequence[str] = ()) -> list[str]:
    """Return the command that starts one run agent on each node.

    The run's secret is sent through srun's stdin, because all users can read arguments. `--cpus-per-task` is omitted,
    because it implies `--exact`. A step without `--exact` and without GPU options has all resources of its job.
    """
    return [
        *_srun(plan, job, nodes, tasks_per_node=1),
        "--no-kill",  # salloc's own `--no-kill` does not apply to steps
        "--kill-on-bad-exit=0",
        "--overlap",  # the step of an srun that died holds its resources for some seconds
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",  # regardless of the export options of an enclosing sbatch
        "--input=all",
        *agent_argv(plan),
    ]


def tasks_argv(plan: RunPlan, job: int | str | None = None, nodes: Sequence[str] = ()) -> list[str]:
    """Return the command that starts the run's processes as srun's tasks, with MPI support if the run needs it."""
    return [
        *_srun(plan, job, nodes, tasks_per_node=plan.shape.nproc_per_node),
        f"--cpus-per-task={plan.job.cpus_per_task}",
        "--kill-on-bad-exit=1",  # otherwise the other tasks would wait forever for the failed one
        f"--mpi={plan.mpi or 'none'}",
        "--export=ALL",
        "--input=none",
        "--open-mode=append",  # keeps the earlier output after a restart
        f"--output={RunFolder(Path(plan.folder.replace('%', '%%'))).generation(1) / 'rank%t.log'}",
        *wrap_guard(plan.request, plan.launcher, program_argv(plan)),
    ]


def agent_argv(plan: RunPlan) -> list[str]:
    """Return the command of the run agent, which receives everything else from its coordinator."""
    return [*launcher_inside(plan.request, plan.launcher), "run-agent", plan.run]


def coordinator_argv(plan: RunPlan) -> list[str]:
    """Return the command of the coordinator, which reads everything else from the run folder."""
    return [*plan.launcher, "run-coordinator", plan.folder]


def program_argv(plan: RunPlan) -> list[str]:
    """Return the user's program and arguments: a Python script with `python -u`, anything else unchanged."""
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
        *container_options(plan.request, plan.folder, plan.launcher),
    ]


def _where(nodes: Sequence[str], tasks_per_node: int) -> list[str]:
    """Return srun's options that select the nodes.

    Outside the job, srun does not know the job's nodes. Inside the job, it also counts lost nodes.
    """
    if not nodes:
        return []
    tasks = len(nodes) * tasks_per_node
    return [f"--nodes={len(nodes)}", f"--ntasks={tasks}", f"--nodelist={node_list(nodes)}"]


# Batch script of a run whose coordinator is not on a head node


# sbatch reads options from every line with this prefix, so no user text may come before these lines.
_MARK = "#SBATCH"
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,@%+&|*()!~^\[\]-]*", re.ASCII)
# sbatch replaces `hetjob` and `packjob` with blanks anywhere in a line.
_BLANKED = re.compile(r"(het|pack)(job)", re.IGNORECASE)


def render_sbatch(plan: RunPlan) -> str:
    """Render the script for `sbatch`."""
    lines = ["#!/bin/bash", f"# Run {plan.run}, by Dal Segno. `dalsegno runs` shows its state."]
    options = [*slurm_options(plan.job), *_batch_options(plan)]
    lines += [f"{_MARK} {sbatch_word(option)}" for option in options]
    lines += ["", f"exec {shlex.join(coordinator_argv(plan))}"]
    return "\n".join(lines) + "\n"


def render_commands(plan: RunPlan) -> str:
    """Return the text that `--dry-run` shows: the request for the job, and the step in it."""
    srun, *rest = step_argv(plan)
    if plan.on_head:
        return f"{shlex.join(salloc_argv(plan))}\n{shlex.join([srun, '--jobid=JOB', *rest])}\n"
    return f"{render_sbatch(plan)}\n# The coordinator starts this step in the job:\n# {shlex.join([srun, *rest])}\n"


def _batch_options(plan: RunPlan) -> list[str]:
    folder = RunFolder(Path(plan.folder.replace("%", "%%")))
    return [
        "--no-kill",
        "--requeue",  # after preemption, Slurm requeues the job and the run continues
        "--open-mode=append",  # keeps the earlier output after a requeue
        f"--output={folder.job_log}",
        *([f"--chdir={plan.request.chdir}"] if plan.request.chdir else []),
    ]


def sbatch_word(word: str) -> str:
    """Return one word quoted for a #SBATCH line. In sbatch's parser, `\\` is an escape character even in quotes."""
    if _PLAIN.fullmatch(word) and not _BLANKED.search(word):
        return word
    if not word.isprintable():
        what = f"{word!r:.60} cannot be written to a batch script"
        raise DalsegnoError(what, hint="remove the line break or other control character from this path or value")
    escaped = re.sub(r'(["\\#])', r"\\\1", word)
    return '"' + _BLANKED.sub(r"\1\\\2", escaped) + '"'
