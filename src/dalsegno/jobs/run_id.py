"""Runs by their id: a new one, all there are, and the one a user means."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from dalsegno.errors import NotThere, UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.jobs.values import shown
from dalsegno.launch.folder import RunFolder

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
