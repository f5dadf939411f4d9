"""How srun is told to start a step again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dalsegno.launch.again.choice import Again
from dalsegno.slurm.facts import JobInfo

_OLD = ("JOB_ID", "JOBID", "JOB_NODELIST", "NODELIST", "NODE_ALIASES", "TASKS_PER_NODE", "JOB_CPUS_PER_NODE")


def arguments(argv: Sequence[str], again: Again) -> list[str]:
    """Before all other options: what the user excludes wins."""
    return [argv[0], *([f"--exclude={','.join(again.without)}"] if again.without else []), *argv[1:]]


def environment(env: Mapping[str, str], again: Again) -> dict[str, str]:
    """The old allocation is forgotten; the new one is of its shape, which the other variables tell srun."""
    if not again.alone or "SLURM_JOB_ID" not in env:
        return dict(env)
    old = {f"SLURM_{name}" for name in _OLD}
    return {**_like(again.job), **{name: value for name, value in env.items() if name not in old}}


def _like(job: JobInfo) -> dict[str, str]:
    limit = "" if job.time_limit_s is None else str(max(1, job.time_limit_s // 60))
    known = {
        "SLURM_PARTITION": job.partition, "SLURM_ACCOUNT": job.account, "SLURM_QOS": job.qos,
        "SLURM_RESERVATION": job.reservation, "SLURM_TIMELIMIT": limit,
    }  # fmt: skip
    return {name: value for name, value in known.items() if value}
