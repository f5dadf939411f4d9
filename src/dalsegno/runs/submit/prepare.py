"""Prepare a run: choose its id, and create its folder with everything that its coordinator needs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from dalsegno.errors import DalsegnoError, NotThere, UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.runs.files import read_value
from dalsegno.runs.folder import RunFolder, repair_hint
from dalsegno.runs.status import RunCause, RunPhase, RunStatus, write_status
from dalsegno.runs.submit.plan import RunPlan
from dalsegno.runs.submit.values import shown
from dalsegno.spec.facts import facts_from_json, facts_to_json
from dalsegno.system.files import damaged, explain, make_folder, owner_name, remove_tree, write_atomic

_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # do not follow links, and do not block on pipes
ELSEWHERE = "fix that, or put the run folder elsewhere with `--output FOLDER`"


def first_status(plan: RunPlan, user: str, now: float) -> RunStatus:
    """Return the first status of a run, which is valid until its coordinator writes one."""
    return RunStatus(
        run=plan.run,
        name=plan.request.label,
        user=user,
        phase=RunPhase.WAITING,
        created=now,
        updated=now,
        wanted_nodes=plan.shape.max_nodes,
        nproc_per_node=plan.shape.nproc_per_node,
        message="handed over",
        cause=RunCause.HANDED_OVER,
    )


def aborted_status(
    status: RunStatus, now: float, exit_code: int, why: str, cause: RunCause = RunCause.OTHER
) -> RunStatus:
    """Return the final status of a run that has no coordinator to write it."""
    return replace(status, phase=RunPhase.ENDED, updated=now, ended=now, exit_code=exit_code, message=why, cause=cause)


def prepare_run(plan: RunPlan, environment: Mapping[str, str], status: RunStatus, home: Path) -> RunFolder:
    """Create the run folder atomically. If it is outside `home`, a link in `home` points to it."""
    folder = Path(plan.folder)
    half = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        make_folder(folder.parent)
        _write_all(RunFolder(half), plan, environment, status)
        _link(home / plan.run, folder)
        os.rename(half, folder)
    except OSError as error:
        raise DalsegnoError(explain(error, folder).what, hint=ELSEWHERE) from error
    except DalsegnoError as error:
        raise DalsegnoError(error.what, where=error.where, hint=ELSEWHERE) from error
    finally:
        remove_tree(half)
    return RunFolder(folder)


def discard_run(run: RunFolder, home: Path) -> None:
    """Remove the folder of a run that no coordinator has taken over, and the link to it."""
    remove_tree(run.root)
    link = home / run.run
    if link.is_symlink():
        link.unlink()


def read_plan(run: RunFolder) -> RunPlan:
    data = read_value(run.plan)
    if not isinstance(data, Mapping):
        raise DalsegnoError(f"run {run.run} has no plan", hint=f"check that {run.root} is a run folder")
    try:
        return facts_from_json(RunPlan, data)
    except ValueError as error:  # for example, a list is too short or too long
        raise damaged(run.plan, str(error), repair_hint(run.plan)) from error


def read_environment(run: RunFolder) -> dict[str, str]:
    """Return the submission's environment.

    Raise if another user owns the file, because it determines which programs run.
    """
    try:
        with _open_own(run) as file:
            data = json.load(file)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise damaged(run.environment, str(error), repair_hint(run.environment)) from error
    return {name: str(value) for name, value in data.items()} if isinstance(data, dict) else {}


def check_own(run: RunFolder) -> None:
    """Raise if another user owns the run. Even root must not write to its folder or start programs from its PATH."""
    with contextlib.suppress(FileNotFoundError):
        _open_own(run).close()


def _open_own(run: RunFolder) -> TextIO:
    """Open the run's environment; raise unless this user owns the file."""
    with contextlib.suppress(PermissionError):
        handle = os.open(run.environment, os.O_RDONLY | _PLAIN)
        if not hasattr(os, "geteuid") or os.fstat(handle).st_uid == os.geteuid():
            return os.fdopen(handle)
        os.close(handle)
    whose = owner_name(run.root)
    raise DalsegnoError(f"run {run.run} belongs to {whose}", hint=f"ask {whose}, or use `sudo -u {whose}`")


def _write_all(run: RunFolder, plan: RunPlan, environment: Mapping[str, str], status: RunStatus) -> None:
    make_folder(run.root)
    make_folder(run.logs)
    write_atomic(run.plan, json.dumps(facts_to_json(plan), indent=1), mode=0o600)
    write_atomic(run.environment, json.dumps(dict(environment)), mode=0o600)
    write_status(run.status, status)


def _link(link: Path, folder: Path) -> None:
    if link == folder:
        return
    make_folder(link.parent)
    link.symlink_to(folder)


# Run ids


# Base 32 without letters that are easily misread: i, l, o, u.
_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"
_MAX_LABEL_CHARS = 60  # maximum length of a label, which must fit into a job name with the random letters
_TRIES = 1000


def random_letters() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(5))


def new_run_id(label: str, taken: Callable[[str], bool], letters: Callable[[], str] = random_letters) -> str:
    """Return an unused, readable id such as `train-k3f9x`."""
    for _ in range(_TRIES):
        run = f"{label[:_MAX_LABEL_CHARS]}-{letters()}"
        if not taken(run):
            return run
    raise UsageError(f"no free id found for a run named {shown(label)}", hint="choose another name with --name")


def list_runs(home: Path) -> list[RunFolder]:
    """Return all runs in this folder, newest first. Anything else in the folder is skipped."""
    try:
        names = [path.name for path in home.iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    made = {name: at for name in names if (at := _made_at(RunFolder(home / name))) is not None}
    return [RunFolder(home / name) for name in sorted(made, key=lambda name: (made[name], name), reverse=True)]


def find_run(home: Path, name: str = "", prefer: Callable[[RunFolder], bool] = lambda run: True) -> RunFolder:
    """Return the run with this id, or the only run whose id starts with it. Without a name, return the newest run.

    If several runs match, return the only one that `prefer` accepts. Raise NotThere if no run matches, and UsageError
    if several do.
    """
    known = list_runs(home)
    if not known:
        raise NotThere("there are no runs yet", hint="start one with `dalsegno run train.py`")
    if not name:
        return known[0]
    found = [run for run in known if run.run == name] or [run for run in known if run.run.startswith(name)]
    if not found:
        hint = did_you_mean(name, [run.run for run in known], otherwise="`dalsegno runs` lists them")
        raise NotThere(f"there is no run {shown(name)}", hint=hint)
    if len(found) > 1:
        found = [run for run in found if prefer(run)] or found
    if len(found) > 1:
        some = ", ".join(run.run for run in found[:5])
        raise UsageError(f"{shown(name)} matches {len(found)} runs: {some}", hint="type more of the id")
    return found[0]


def _made_at(run: RunFolder) -> float | None:
    """Return when the run was submitted, which is the time of its plan file; None if this is not a run folder."""
    with contextlib.suppress(OSError):
        about = os.stat(run.plan, follow_symlinks=False)
        return about.st_mtime if stat.S_ISREG(about.st_mode) else None
    return None
