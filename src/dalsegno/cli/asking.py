"""Asking a cluster's controller, and what it says turned into words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dalsegno.errors import CommandFailed, CommandTimedOut, DalsegnoError, NotThere
from dalsegno.slurm.parse.messages import SlurmTrouble, parse_troubles

if TYPE_CHECKING:
    from pathlib import Path

import os
import re
from collections.abc import Mapping

# ---- A Slurm that does not answer, or that there is none, told from one that says no.


_SILENT = frozenset({SlurmTrouble.NO_CONTROLLER, SlurmTrouble.DISCONNECTED, SlurmTrouble.NO_CONNECTION})


def is_silence(fault: CommandFailed) -> bool:
    return isinstance(fault, CommandTimedOut) or not _SILENT.isdisjoint(parse_troubles(fault.stderr))


def meaning_of(fault: CommandFailed) -> DalsegnoError:
    """That there is no cluster, where Slurm's commands are installed and belong to none; else what they say."""
    return no_cluster() if SlurmTrouble.NO_SETTINGS in parse_troubles(fault.stderr) else fault


def no_cluster() -> DalsegnoError:
    hint = "`dalsegno init` and `dalsegno up` make one here; on somebody's, set SLURM_CONF as they tell you"
    return NotThere("there is no cluster yet", hint=hint)


# ---- Asking a cluster's controller, and what it says turned into words.


ANSWER_S = 10.0


def controller_of(name: str | None) -> Path:
    """The socket of the cluster's controller."""
    from dalsegno.cluster import find_slurm

    slurm = find_slurm(name)
    if slurm.controller is None and not slurm.env.get("SLURM_CONF"):
        raise no_cluster()
    if slurm.controller is None:
        raise DalsegnoError("this cluster is not ours: it has no controller", hint="`dalsegno ls` shows those that are")
    return slurm.controller


def ask_controller(socket: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Its answer; a refusal is an error of its own words."""
    from dalsegno.recovery.client import ask

    answer = ask(socket, request, ANSWER_S)
    if "error" in answer:
        raise DalsegnoError(str(answer["error"]), hint=str(answer.get("hint", "")))
    return answer


def when(at: float | None) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at)) if at else "-"


# ---- Slurm's own commands in what we tell a user: written so that they work in the shell the user is in.


_COMMANDS = ("sacct", "sacctmgr", "scancel", "scontrol", "sinfo", "sprio", "squeue")
_QUOTED = re.compile(rf"`(?=(?:{'|'.join(_COMMANDS)})\b)")


def way_in(name: str | None = None, env: Mapping[str, str] = os.environ) -> str:
    """What goes before such a command; nothing in a shell that has its Slurm already."""
    from dalsegno.cluster import places

    if name:
        return f"dalsegno shell --cluster {name} -- "
    has_one = env.get("SLURM_CONF") or not (env.get("DALSEGNO_CLUSTER") or places(env))
    return "" if has_one else "dalsegno shell -- "


def as_typed(command: str, before: str) -> str:
    """One command; what is not Slurm's stays as it is."""
    return f"{before}{command}" if command.split(" ", 1)[0] in _COMMANDS else command


def in_text(text: str) -> str:
    """Those that stand in backticks in a hint."""
    return _QUOTED.sub(f"`{way_in()}", text) if _QUOTED.search(text) else text
