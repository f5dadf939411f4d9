"""One Slurm job as it is asked for: the options that salloc and sbatch have in common."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.jobs.values import NO_GPUS, ONE_NODE, UNLIMITED_S, Gpus, Nodes
from dalsegno.launch.run_comment import JobRole, left_comment
from dalsegno.slurm.names import node_list

# USR1 has been NCCL's; Slurm's default goes to all steps and not to the batch shell.
SAVE_SIGNAL = "USR2"


@dataclass(frozen=True)
class JobAsk:
    """What one job of a run asks of Slurm. `role` is what it is to the run."""

    name: str
    role: JobRole = JobRole.MAIN
    nodes: Nodes = ONE_NODE
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    memory_mib: int | None = None
    gpus: Gpus = NO_GPUS
    gres: str = "gpu"
    time_limit_s: int | None = None
    signal_lead_s: int = 120
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: tuple[str, ...] = ()
    dependency: str = ""
    extra: tuple[str, ...] = ()


def slurm_options(job: JobAsk) -> list[str]:
    """`--name=value` words, the user's own extras last so that they win."""
    asked = {
        "job-name": job.name,
        "comment": left_comment(job.role, ()),
        "nodes": _span(job.nodes),
        # With it, Slurm 22.05 gives a range of nodes only its least: it counts the tasks of that many.
        "ntasks-per-node": str(job.tasks_per_node) if job.nodes.min == job.nodes.max else "",
        "cpus-per-task": str(job.cpus_per_task),
        "mem": "" if job.memory_mib is None else f"{job.memory_mib}M",
        **_gpu_option(job),
        "time": "" if job.time_limit_s is None else slurm_time(job.time_limit_s),
        # Only agents know what it means: a program of srun's own would die of it.
        "signal": f"{SAVE_SIGNAL}@{job.signal_lead_s}" if job.signal_lead_s else "",
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "exclude": node_list(job.exclude) if job.exclude else "",
        "dependency": job.dependency,
    }
    return [*(f"--{name}={value}" for name, value in asked.items() if value), *job.extra]


def slurm_time(seconds: int) -> str:
    """As Slurm writes it: `1-02:03:04`. No limit is 0."""
    if seconds == UNLIMITED_S:
        return "0"
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{days}-{clock}" if days else clock


def _span(nodes: Nodes) -> str:
    return str(nodes.max) if nodes.min == nodes.max else f"{nodes.min}-{nodes.max}"


def _gpu_option(job: JobAsk) -> dict[str, str]:
    if not job.gpus.count:
        return {}
    if job.gres == "gpu":
        return {"gpus-per-node": str(job.gpus)}
    return {"gres": f"{job.gres}:{job.gpus}"}  # --gpus-per-node means gres/gpu only
