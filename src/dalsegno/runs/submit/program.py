"""Check a run's program and Python before the run is queued."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from posixpath import basename, join

from dalsegno.errors import DalsegnoError, UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.runs.submit.request import RunRequest
from dalsegno.runs.submit.values import shown
from dalsegno.system.processes import LocalRunner

# Environment of the run's processes


# Prefixes of variables that an enclosing job or step sets, and that would affect this run's srun
_OF_ANOTHER_JOB = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_")
_KEPT = ("SLURM_CONF",)  # variables that are kept, because they select the cluster


def prefix_of(request: RunRequest) -> str:
    """Return the folder of the Python environment, resolved from the run's working folder; "" if none is given."""
    given = request.venv or request.conda
    return join(request.chdir, given) if given else ""


def python_of(request: RunRequest, otherwise: str) -> str:
    """Return the Python that runs the processes."""
    prefix = prefix_of(request)
    return join(prefix, "bin", "python") if prefix else otherwise


def activation(request: RunRequest) -> dict[str, str]:
    """Return the variables that activating the environment sets, except PATH."""
    prefix = prefix_of(request)
    if request.venv:
        return {"VIRTUAL_ENV": prefix}
    return {"CONDA_PREFIX": prefix, "CONDA_DEFAULT_ENV": basename(prefix.rstrip("/"))} if request.conda else {}


def run_environment(request: RunRequest, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that srun passes on to the agents. `base` is the environment of the submission."""
    kept = {name: value for name, value in base.items() if name in _KEPT or not name.startswith(_OF_ANOTHER_JOB)}
    prefix = prefix_of(request)
    if prefix:
        kept["PATH"] = f"{join(prefix, 'bin')}:{kept.get('PATH', '/usr/bin:/bin')}"
        kept.pop("PYTHONHOME", None)
    return {**kept, **activation(request), **dict(request.env)}


# Checking the program and its interpreter


LAUNCHERS = ("torchrun", "python", "python3")


def check_program(request: RunRequest, environ: Mapping[str, str]) -> None:
    """Raise UsageError unless the script, the working folder and the Python environment exist and can be used."""
    folder = Path(request.chdir or ".")
    if not folder.is_dir():
        raise UsageError(f"folder `{folder}` does not exist", where="--chdir", hint="name an existing folder")
    _check_prefix(request)
    file = folder / request.script
    _refuse_launchers(request, file)
    if file.is_dir():
        raise UsageError(f"{shown(request.script)} is a folder, not a script", hint="name the script in it")
    if file.is_file():
        _check_rights(request, file)
    elif not (_may_be_any_program(request) and (request.container_image or _on_path(request.script, environ))):
        raise UsageError(f"{_kind(request)} {shown(request.script)} not found", hint=_hint(request, file))


def _refuse_launchers(request: RunRequest, file: Path) -> None:
    """Raise UsageError for `torchrun` and `python`, which `run` replaces, unless a script has that name."""
    name = os.path.basename(request.script)
    if name not in LAUNCHERS or _may_be_any_program(request) or file.is_file():
        return
    script = next((word for word in request.args if word.endswith(".py")), "SCRIPT")
    raise UsageError(
        f"`{name}` is not a script: `dalsegno run` starts the processes itself",
        hint=f"remove {name} and put its options before the script: `dalsegno run {script}`",
    )


def find_python(environ: Mapping[str, str], module: str = "") -> str:
    """Return the Python of the active virtual environment, or `python3` in the user's PATH.

    If that `python3` lacks `module` but the Python of `dalsegno` has it, return the latter. This happens in a clone of
    the repository that was set up with torch.
    """
    active = os.path.join(environ.get("VIRTUAL_ENV", ""), "bin", "python3")
    if environ.get("VIRTUAL_ENV") and os.access(active, os.X_OK):
        return active
    found = shutil.which("python3", path=environ.get("PATH"))
    python = os.path.abspath(found) if found else "python3"
    if module and find_spec(module) and not _has(python, module):
        return sys.executable
    return python


def check_torch(request: RunRequest, python: str, *, certain: bool) -> tuple[str, ...]:
    """Return a note if this Python lacks PyTorch. If the nodes have the same files (`certain`), raise instead."""
    needs = request.framework == "torch" and not _may_be_any_program(request) and not request.container_image
    if not needs or (find_spec("torch") if python == sys.executable else _has(python, "torch")):
        return ()
    what, hint = (
        f"PyTorch is not installed in {python}",
        "run `dalsegno setup --torch`, or name another with `--venv PATH`",
    )
    if prefix_of(request):
        word = "venv" if request.venv else "conda"
        hint = f"run `{shlex.quote(python)} -m pip install torch`, or name another environment with `--{word} PATH`"
    if certain:
        raise UsageError(what, hint=hint)
    return (f"{what}: {hint}",)


def _has(python: str, module: str) -> bool:
    ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return LocalRunner().run([python, "-c", ask], timeout_s=10).exit_code == 0
    except DalsegnoError:
        return False


def _check_prefix(request: RunRequest) -> None:
    prefix = prefix_of(request)
    if prefix and not os.access(os.path.join(prefix, "bin", "python"), os.X_OK):
        word = "venv" if request.venv else "conda"
        hint = f"create one with `python3 -m venv {prefix}`" if request.venv else "`conda env list` shows the prefixes"
        raise UsageError(f"no Python found in `{prefix}`", where=f"--{word}", hint=hint)


def _check_rights(request: RunRequest, file: Path) -> None:
    if not os.access(file, os.R_OK):
        raise UsageError(
            f"{shown(request.script)} is not readable", hint=f"check its permissions with `ls -l {request.script}`"
        )
    if _may_be_any_program(request) and not request.script.endswith(".py") and not os.access(file, os.X_OK):
        raise UsageError(f"{shown(request.script)} is not executable", hint=f"chmod +x {request.script}")


def _may_be_any_program(request: RunRequest) -> bool:
    """Return whether the script may be any program. If not, it must be Python, because the warm parent runs it."""
    return request.no_preload or not request.has_agents


def _on_path(script: str, environ: Mapping[str, str]) -> bool:
    return "/" not in script and shutil.which(script, path=environ.get("PATH")) is not None


def _kind(request: RunRequest) -> str:
    return "program" if _may_be_any_program(request) else "script"


def _hint(request: RunRequest, file: Path) -> str:
    beside = [each.name for each in file.parent.iterdir()] if file.parent.is_dir() else []
    if not _may_be_any_program(request) and shutil.which(request.script):
        return "a program that is not a Python script needs `--no-preload`, or `--framework plain`"
    return did_you_mean(file.name, beside, otherwise=f"no such file in {file.parent.resolve()}")
