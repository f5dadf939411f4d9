"""Who asks, and what they may ask for: uid to identity and environment, and the folder that must be theirs."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.recovery.records import RUN_ID
from dalsegno.runs.folder import RunFolder
from dalsegno.system.children import Identity

MOST_RUNS = 500  # each costs a process and an open file; the usual limit of those is 1024
MOST_RUNS_OF_A_USER = 64  # some 30 MB of the head each, and an eighth of the above: no one keeps the others out
PASSED_ON = ("PATH", "SLURM_CONF", "LC_ALL", "DALSEGNO_MARK")


def look_up(uid: int, own: Mapping[str, str]) -> tuple[Identity | None, dict[str, str]]:
    """Whom a coordinator shall be (None: just what we are) and its environment. `own` is the controller's."""
    try:
        person = pwd.getpwuid(uid)
    except KeyError:
        raise DalsegnoError(
            f"the head node knows no user with uid {uid}", hint="`users:` in the cluster file adds one"
        ) from None
    env = {name: own[name] for name in PASSED_ON if name in own}
    env |= {"HOME": person.pw_dir, "USER": person.pw_name, "LOGNAME": person.pw_name}
    if uid == os.geteuid():
        return None, env
    groups = tuple(os.getgrouplist(person.pw_name, person.pw_gid))
    return Identity(uid, person.pw_gid, groups), env


def check_may_ask(uid: int) -> None:
    """A controller without root can be no one but itself."""
    own = os.geteuid()
    if own not in (0, uid):
        raise DalsegnoError(
            f"this cluster runs without root, so only its owner (uid {own}) can have runs kept here",
            hint="make a cluster of your own, or have it made with sudo",
        )


def check_room(uid: int, kept: Sequence[int]) -> None:
    """Whether one run more of this user may be kept; `kept` are the owners of those that are."""
    if len(kept) >= MOST_RUNS:
        raise DalsegnoError(f"the controller keeps {MOST_RUNS} runs already", hint="try again when some have ended")
    if uid != os.geteuid() and kept.count(uid) >= MOST_RUNS_OF_A_USER:
        raise DalsegnoError(
            f"the controller keeps {MOST_RUNS_OF_A_USER} runs of yours already, the most that one user may have",
            hint="`dalsegno runs` lists them: wait until some have ended, or `dalsegno cancel` some",
        )


def check_folder(folder: object, uid: int) -> str:
    """The path of a run's folder that belongs to the caller.

    One answer for all that may be wrong: whoever asks must not learn what is in places they cannot see.
    """
    if not (isinstance(folder, str) and folder == os.path.normpath(folder) and folder.startswith("/")):
        raise DalsegnoError("a run's folder is named by its whole path", hint="such as /home/ada/runs/ID")
    if not RUN_ID.fullmatch(Path(folder).name):
        what = "the last part of a run's folder is its id: letters, digits, `.`, `_` and `-`"
        raise DalsegnoError(what, hint="such as /home/ada/runs/train-k3m9x")
    if not _is_run_of(folder, uid):
        raise DalsegnoError(
            f"{folder!r} is no run's folder of yours on the head node",
            hint="it must belong to you, hold a plan.json, and be seen from the head node",
        )
    return folder


def _is_run_of(folder: str, uid: int) -> bool:
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (OSError, ValueError):  # ValueError: letters that no path can hold
        return False
    try:
        plan = os.stat(RunFolder(Path(folder)).plan.name, dir_fd=handle, follow_symlinks=False)
        return os.fstat(handle).st_uid == uid and stat.S_ISREG(plan.st_mode)
    except OSError:
        return False
    finally:
        os.close(handle)
