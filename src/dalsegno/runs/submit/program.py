"""Whether what a run shall run is there, asked before the run waits in a queue for an hour to find that it is not."""

from __future__ import annotations

import os
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

# ---- The environment a run's processes start in: the user's Python environment, the user's variables.


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


# ---- Whether what a run shall run is there, asked before the run waits in a queue for an hour to find that it is
# not.


LAUNCHERS = ("torchrun", "python", "python3")


def check_program(request: RunRequest, environ: Mapping[str, str]) -> None:
    """Raises UsageError unless script, working folder and Python environment are there."""
    folder = Path(request.chdir or ".")
    if not folder.is_dir():
        raise UsageError(f"there is no folder `{folder}`", where="--chdir", hint="name one that exists")
    _check_prefix(request)
    file = folder / request.script
    _refuse_launchers(request, file)
    if file.is_dir():
        raise UsageError(f"{shown(request.script)} is a folder, not a script", hint="name the script in it")
    if file.is_file():
        _check_rights(request, file)
    elif not (_may_be_any_program(request) and (request.container_image or _on_path(request.script, environ))):
        raise UsageError(f"there is no {_kind(request)} {shown(request.script)}", hint=_hint(request, file))


def _refuse_launchers(request: RunRequest, file: Path) -> None:
    """`run` is what torchrun is; a script of that name in this folder is a script."""
    name = os.path.basename(request.script)
    if name not in LAUNCHERS or _may_be_any_program(request) or file.is_file():
        return
    script = next((word for word in request.args if word.endswith(".py")), "SCRIPT")
    raise UsageError(
        f"`{name}` is not a script: `dalsegno run` starts the processes itself",
        hint=f"leave {name} out, and put its options before the script: `dalsegno run {script}`",
    )


def find_python(environ: Mapping[str, str], module: str = "") -> str:
    """The Python that `python3` is in the user's shell; that of an active virtual environment first.

    Where that one lacks the module the run needs and our own Python has it, ours: a clone that was set up with torch.
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
    """A note, or an error where it is `certain` that the nodes see what we see, if this Python lacks PyTorch."""
    needs = request.framework == "torch" and not _may_be_any_program(request) and not request.container_image
    if not needs or (find_spec("torch") if python == sys.executable else _has(python, "torch")):
        return ()
    what, hint = f"there is no PyTorch in {python}", "`dalsegno setup --torch` installs it, `--venv PATH` names another"
    if prefix := prefix_of(request):
        word = "venv" if request.venv else "conda"
        hint = f"`{python} -m pip install torch` installs it in {prefix}; `--{word} PATH` names another environment"
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
        hint = f"`python3 -m venv {prefix}` makes one" if request.venv else "`conda env list` shows the prefixes"
        raise UsageError(f"there is no Python in `{prefix}`", where=f"--{word}", hint=hint)


def _check_rights(request: RunRequest, file: Path) -> None:
    if not os.access(file, os.R_OK):
        raise UsageError(f"{shown(request.script)} may not be read", hint=f"`ls -l {request.script}` shows who may")
    if _may_be_any_program(request) and not request.script.endswith(".py") and not os.access(file, os.X_OK):
        raise UsageError(f"{shown(request.script)} is not executable", hint=f"chmod +x {request.script}")


def _may_be_any_program(request: RunRequest) -> bool:
    """Else it is a Python script: the warm parent runs it in itself."""
    return request.no_preload or not request.has_agents


def _on_path(script: str, environ: Mapping[str, str]) -> bool:
    return "/" not in script and shutil.which(script, path=environ.get("PATH")) is not None


def _kind(request: RunRequest) -> str:
    return "program" if _may_be_any_program(request) else "script"


def _hint(request: RunRequest, file: Path) -> str:
    beside = [each.name for each in file.parent.iterdir()] if file.parent.is_dir() else []
    if not _may_be_any_program(request) and shutil.which(request.script):
        return "a program that is no Python script needs `--no-preload`, or `--framework plain`"
    return did_you_mean(file.name, beside, otherwise=f"there is none in {file.parent.resolve()}")
