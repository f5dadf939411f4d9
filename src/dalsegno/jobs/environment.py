"""The environment a run's processes start in: the user's Python environment, the user's variables."""

from __future__ import annotations

from collections.abc import Mapping
from posixpath import basename, join

from dalsegno.jobs.request import RunRequest

# Left from the job or step we are called from, these would steer our own srun; SLURM_CONF says which cluster.
_OF_ANOTHER_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
_KEPT = ("SLURM_CONF",)


def prefix_of(request: RunRequest) -> str:
    """Folder of the Python environment, absolute if the request says where it runs; "" if it names none."""
    given = request.venv or request.conda
    return join(request.chdir, given) if given else ""


def python_of(request: RunRequest, otherwise: str) -> str:
    """The Python that the processes run in."""
    prefix = prefix_of(request)
    return join(prefix, "bin", "python") if prefix else otherwise


def activation(request: RunRequest) -> dict[str, str]:
    """What activating the environment sets, PATH aside."""
    prefix = prefix_of(request)
    if request.venv:
        return {"VIRTUAL_ENV": prefix}
    return {"CONDA_PREFIX": prefix, "CONDA_DEFAULT_ENV": basename(prefix.rstrip("/"))} if request.conda else {}


def run_environment(request: RunRequest, base: Mapping[str, str]) -> dict[str, str]:
    """Everything an srun from outside a job hands on to the agents; `base` is where the user asked for the run."""
    kept = {name: value for name, value in base.items() if name in _KEPT or not name.startswith(_OF_ANOTHER_JOB)}
    prefix = prefix_of(request)
    if prefix:
        kept["PATH"] = f"{join(prefix, 'bin')}:{kept.get('PATH', '/usr/bin:/bin')}"
        kept.pop("PYTHONHOME", None)
    return {**kept, **activation(request), **dict(request.env)}
