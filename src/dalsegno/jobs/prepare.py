"""A planned run becomes a folder: all that its coordinator needs is in it before anybody is told of the run."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from dalsegno.errors import DalsegnoError
from dalsegno.jobs.plan import RunPlan
from dalsegno.launch.folder import RunFolder, mending
from dalsegno.launch.run_files import read_value
from dalsegno.launch.status import RunCause, RunPhase, Status, write_status
from dalsegno.spec.facts import facts_from_json, facts_to_json
from dalsegno.system.files import damaged, explain, make_folder, owner_name, remove_tree, write_atomic

_PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no link, and no pipe to wait for
ELSEWHERE = "mend that, or have the run's folder elsewhere: `--output FOLDER`"


def first_status(plan: RunPlan, user: str, now: float) -> Status:
    """What people are told until the run's coordinator speaks."""
    return Status(
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


def given_up(status: Status, now: float, exit_code: int, why: str, cause: RunCause = RunCause.OTHER) -> Status:
    """The end of a run that has no coordinator to tell of it."""
    return replace(status, phase=RunPhase.ENDED, updated=now, ended=now, exit_code=exit_code, message=why, cause=cause)


def prepare_run(plan: RunPlan, environment: Mapping[str, str], status: Status, home: Path) -> RunFolder:
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


def _write_all(run: RunFolder, plan: RunPlan, environment: Mapping[str, str], status: Status) -> None:
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
