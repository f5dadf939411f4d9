"""A run as a user asks for it, and what it asks of Slurm: requests, job files, plans, steps, frameworks.

The names below are loaded when first used: a command that only reads a torchrun line pays for nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dalsegno.jobs.cluster_facts import ClusterFacts, PartitionFacts, partitions_of, partitions_seen
    from dalsegno.jobs.environment import run_environment
    from dalsegno.jobs.frameworks import World, framework_env
    from dalsegno.jobs.job_ask import JobAsk
    from dalsegno.jobs.job_file import job_fields, load_job, parse_job
    from dalsegno.jobs.job_model import job_schema
    from dalsegno.jobs.mpi import MPI_LIST_ARGV, choose_mpi, parse_mpi_types
    from dalsegno.jobs.options import OPTIONS, Option, make_request, options_from_env, parse_option
    from dalsegno.jobs.plan import RunPlan, plan_join, plan_next, plan_run, salloc_argv
    from dalsegno.jobs.prepare import (
        check_own,
        discard_run,
        first_status,
        given_up,
        prepare_run,
        read_environment,
        read_plan,
    )
    from dalsegno.jobs.program import check_program, check_torch, find_python
    from dalsegno.jobs.request import RunRequest
    from dalsegno.jobs.run_id import find_run, list_runs, new_run_id
    from dalsegno.jobs.sbatch import render_commands, render_sbatch
    from dalsegno.jobs.steps import agents_argv, coordinator_argv, step_argv, tasks_argv
    from dalsegno.jobs.torchrun.args import TorchrunArgs, count_processes
    from dalsegno.jobs.torchrun.flags import parse_torchrun
    from dalsegno.jobs.values import Gpus, Nodes, parse_env_pairs, parse_nodes

__all__ = [
    "MPI_LIST_ARGV",
    "OPTIONS",
    "ClusterFacts",
    "Gpus",
    "JobAsk",
    "Nodes",
    "Option",
    "PartitionFacts",
    "RunPlan",
    "RunRequest",
    "TorchrunArgs",
    "World",
    "agents_argv",
    "check_own",
    "check_program",
    "check_torch",
    "choose_mpi",
    "coordinator_argv",
    "count_processes",
    "discard_run",
    "find_python",
    "find_run",
    "first_status",
    "framework_env",
    "given_up",
    "job_fields",
    "job_schema",
    "list_runs",
    "load_job",
    "make_request",
    "new_run_id",
    "options_from_env",
    "parse_env_pairs",
    "parse_job",
    "parse_mpi_types",
    "parse_nodes",
    "parse_option",
    "parse_torchrun",
    "partitions_of",
    "partitions_seen",
    "plan_join",
    "plan_next",
    "plan_run",
    "prepare_run",
    "read_environment",
    "read_plan",
    "render_commands",
    "render_sbatch",
    "run_environment",
    "salloc_argv",
    "step_argv",
    "tasks_argv",
]

# No module may bear the name of something it holds: importing it would hide that from `__getattr__`.
_HOMES = {
    "cluster_facts": ("ClusterFacts", "PartitionFacts", "partitions_of", "partitions_seen"),
    "environment": ("run_environment",),
    "frameworks": ("World", "framework_env"),
    "job_ask": ("JobAsk",),
    "job_file": ("job_fields", "load_job", "parse_job"),
    "job_model": ("job_schema",),
    "mpi": ("MPI_LIST_ARGV", "choose_mpi", "parse_mpi_types"),
    "options": ("OPTIONS", "Option", "make_request", "options_from_env", "parse_option"),
    "plan": ("RunPlan", "plan_join", "plan_next", "plan_run", "salloc_argv"),
    "prepare": (
        "check_own",
        "discard_run",
        "first_status",
        "given_up",
        "prepare_run",
        "read_environment",
        "read_plan",
    ),
    "program": ("check_program", "check_torch", "find_python"),
    "request": ("RunRequest",),
    "run_id": ("find_run", "list_runs", "new_run_id"),
    "sbatch": ("render_commands", "render_sbatch"),
    "steps": ("agents_argv", "coordinator_argv", "step_argv", "tasks_argv"),
    "torchrun.args": ("TorchrunArgs", "count_processes"),
    "torchrun.flags": ("parse_torchrun",),
    "values": ("Gpus", "Nodes", "parse_env_pairs", "parse_nodes"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
