"""A planned run becomes a folder: all that its coordinator needs is in it before anybody is told of the run."""

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
from dalsegno.runs.folder import RunFolder, mending
from dalsegno.runs.status import RunCause, RunPhase, RunStatus, write_status
from dalsegno.runs.submit.plan import RunPlan
from dalsegno.runs.submit.values import shown
from dalsegno.spec.facts import facts_from_json, facts_to_json
from dalsegno.system.files import damaged, explain, make_folder, owner_name, remove_tree, write_atomic

_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no link, and no pipe to wait for
ELSEWHERE = "mend that, or have the run's folder elsewhere: `--output FOLDER`"


def first_status(plan: RunPlan, user: str, now: float) -> RunStatus:
    """What people are told until the run's coordinator speaks."""
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


def given_up(status: RunStatus, now: float, exit_code: int, why: str, cause: RunCause = RunCause.OTHER) -> RunStatus:
    """The end of a run that has no coordinator to tell of it."""
    return replace(status, phase=RunPhase.ENDED, updated=now, ended=now, exit_code=exit_code, message=why, cause=cause)


def prepare_run(plan: RunPlan, environment: Mapping[str, str], status: RunStatus, home: Path) -> RunFolder:
    """Make the run's folder, whole or not at all. One that lies elsewhere is found in `home` by a link."""
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
    """Take back a run that nobody took over."""
    remove_tree(run.root)
    link = home / run.run
    if link.is_symlink():
        link.unlink()


def read_plan(run: RunFolder) -> RunPlan:
    data = read_value(run.plan)
    if not isinstance(data, Mapping):
        raise DalsegnoError(f"run {run.run} has no plan", hint=f"is {run.root} the folder of a run?")
    return facts_from_json(RunPlan, data)


def read_environment(run: RunFolder) -> dict[str, str]:
    """The variables the run was asked for with, for its owner alone: they say which Slurm and whose programs to use."""
    try:
        with _open_own(run) as file:
            data = json.load(file)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise damaged(run.environment, str(error), mending(run.environment)) from error
    return {name: str(value) for name, value in data.items()} if isinstance(data, dict) else {}


def check_own(run: RunFolder) -> None:
    """Raise for another user's run, also as root: who must not write there, nor start what its PATH leads to."""
    with contextlib.suppress(FileNotFoundError):
        _open_own(run).close()


def _open_own(run: RunFolder) -> TextIO:
    """Open the run's environment, which only its owner can have written and may read."""
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


# ---- Runs by their id: a new one, all there are, and the one a user means.


# Base 32 without the letters that are read as others: i, l, o, u.
_LETTERS = "0123456789abcdefghjkmnpqrstvwxyz"
_LONGEST_LABEL = 60  # so that label and letters together still make a job's name
_TRIES = 1000


def random_letters() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(5))


def new_run_id(label: str, taken: Callable[[str], bool], letters: Callable[[], str] = random_letters) -> str:
    """An id that nothing else bears, and that people can read: `train-k3f9x`."""
    for _ in range(_TRIES):
        run = f"{label[:_LONGEST_LABEL]}-{letters()}"
        if not taken(run):
            return run
    raise UsageError(f"every id for a run {shown(label)} is taken", hint="give it another name with --name")


def list_runs(home: Path) -> list[RunFolder]:
    """All runs of this home, the newest first. Links whose folder is gone are passed over."""
    try:
        names = [path.name for path in home.iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    made = {name: at for name in names if (at := _made_at(RunFolder(home / name))) is not None}
    return [RunFolder(home / name) for name in sorted(made, key=lambda name: (made[name], name), reverse=True)]


def find_run(home: Path, name: str = "", prefer: Callable[[RunFolder], bool] = lambda run: True) -> RunFolder:
    """The run of that id, or the only one whose id starts so; the newest if none is named.

    Of several that start so, the only one that is preferred.
    """
    known = list_runs(home)
    if not known:
        raise NotThere("there are no runs yet", hint="`dalsegno run train.py` starts one")
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
        raise UsageError(f"{shown(name)} may be any of {len(found)} runs: {some}", hint="write more of its id")
    return found[0]


def _made_at(run: RunFolder) -> float | None:
    """When it was asked for: the plan is written once and never changed. None if this is no run."""
    with contextlib.suppress(OSError):
        about = os.stat(run.plan, follow_symlinks=False)
        return about.st_mtime if stat.S_ISREG(about.st_mode) else None
    return None
