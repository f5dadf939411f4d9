"""Whether what a run shall run is there, asked before the run waits in a queue for an hour to find that it is not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.jobs.environment import prefix_of
from dalsegno.jobs.request import RunRequest
from dalsegno.jobs.values import shown


def check_program(request: RunRequest, environ: Mapping[str, str]) -> None:
    """Raises UsageError unless script, working folder and Python environment are there."""
    folder = Path(request.chdir or ".")
    if not folder.is_dir():
        raise UsageError(f"there is no folder `{folder}`", where="--chdir", hint="name one that exists")
    _check_prefix(request)
    file = folder / request.script
    if file.is_dir():
        raise UsageError(f"{shown(request.script)} is a folder, not a script", hint="name the script in it")
    if file.is_file():
        _check_rights(request, file)
    elif not (_may_be_any_program(request) and _on_path(request.script, environ)):
        raise UsageError(f"there is no {_kind(request)} {shown(request.script)}", hint=_hint(request, file))


def find_python(environ: Mapping[str, str]) -> str:
    """The Python that `python3` is in the user's shell; that of an active virtual environment first."""
    own = os.path.join(environ.get("VIRTUAL_ENV", ""), "bin", "python3")
    if environ.get("VIRTUAL_ENV") and os.access(own, os.X_OK):
        return own
    found = shutil.which("python3", path=environ.get("PATH"))
    return os.path.abspath(found) if found else "python3"


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
