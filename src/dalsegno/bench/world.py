"""Which process of how many this one is, by its environment: torchrun's words, or srun's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile

_FIRST_PORT, _PORTS = 20_000, 20_000


def world_env(environ: Mapping[str, str], first_host: Callable[[str], str]) -> dict[str, str] | None:
    """What torch has to find in the environment; None where nobody started us as one of several.

    `first_host` reads Slurm's host lists. In a batch script, too, Slurm says which task this is, but only a step of
    srun's says how many the step has.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return {}
    if not environ.get("SLURM_STEP_NUM_TASKS") or "SLURM_PROCID" not in environ:
        return None
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": _first_number(environ.get("SLURM_STEP_TASKS_PER_NODE", "")) or "1",
        "MASTER_ADDR": first_host(environ["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_port(environ)),
    }


def local_env(rank: int, processes: int) -> dict[str, str]:
    """For one of several processes on this machine. Threads as torchrun sets them, or they would fight for cores."""
    local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
    return {"RANK": str(rank), "WORLD_SIZE": str(processes), **local, "OMP_NUM_THREADS": "1"}


def _first_number(tasks_per_node: str) -> str:
    """Slurm writes `4(x2),3`: four on each of two nodes, then three."""
    return "".join(takewhile(str.isdigit, tasks_per_node))


def _port(environ: Mapping[str, str]) -> int:
    """The same for all tasks of a step, and another for the next one."""
    job, step = int(environ.get("SLURM_JOB_ID", 0)), int(environ.get("SLURM_STEP_ID", 0))
    return _FIRST_PORT + (job * 101 + step) % _PORTS
