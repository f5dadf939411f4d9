"""Requests to a cluster's controller, the meaning of errors from Slurm's commands, and Slurm commands in messages."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

from dalsegno.errors import CommandFailed, CommandTimedOut, DalsegnoError, NotThere
from dalsegno.slurm.parse.messages import SlurmTrouble, parse_troubles

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere

_SILENT = frozenset({SlurmTrouble.NO_CONTROLLER, SlurmTrouble.DISCONNECTED, SlurmTrouble.NO_CONNECTION})


def is_silence(fault: CommandFailed) -> bool:
    """Return whether a command of Slurm failed because slurmctld did not answer, or because the command timed out."""
    return isinstance(fault, CommandTimedOut) or not _SILENT.isdisjoint(parse_troubles(fault.stderr))


def meaning_of(fault: CommandFailed) -> DalsegnoError:
    """Return the `no_cluster()` error if Slurm's commands found no slurm.conf; otherwise return the failure itself."""
    return no_cluster() if SlurmTrouble.NO_SETTINGS in parse_troubles(fault.stderr) else fault


def slurm_failure(fault: CommandFailed) -> DalsegnoError:
    """Return the error for a failed Slurm command: no cluster, a slurmctld that does not answer, or the failure
    itself."""
    from dalsegno.cluster import no_answer

    # checked first: without slurm.conf, commands also report that slurmctld does not answer
    meaning = meaning_of(fault)
    return no_answer() if meaning is fault and is_silence(fault) else meaning


def no_cluster() -> DalsegnoError:
    hint = "create one here with `dalsegno init` and `dalsegno up`, or set SLURM_CONF to use an existing one"
    return NotThere("there is no cluster yet", hint=hint)


ANSWER_S = 10.0
PING_S = 3.0


def _refuse_missing(slurm: SlurmHere) -> None:
    """Raise the `no_cluster()` error if this machine has Slurm's commands, but neither slurm.conf nor a cluster."""
    if slurm.env.get("SLURM_CONF"):
        return
    if which("sinfo", path=slurm.env.get("PATH")) is None:
        raise no_cluster()
    try:
        slurm.client_within(PING_S).scontrol("ping")
    except CommandFailed as fault:
        if (meaning := meaning_of(fault)) is not fault:
            raise meaning from None


def find_controller(name: str | None) -> Path:
    """Return the socket of the cluster's controller, or that of `dalsegno adopt watch`."""
    from dalsegno.cluster import find_slurm

    slurm = find_slurm(name)
    socket = slurm.controller or slurm.watcher
    if socket is None:
        _refuse_missing(slurm)
        raise DalsegnoError(
            "this cluster has no controller: Dal Segno did not create it",
            hint="`dalsegno adopt watch` watches its nodes; `dalsegno ls` lists the clusters that Dal Segno created",
        )
    return socket


def ask_controller(socket: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return the controller's answer, or raise the error that it reports."""
    from dalsegno.recovery.client import ask

    answer = ask(socket, request, ANSWER_S)
    if "error" in answer:
        raise DalsegnoError(str(answer["error"]), hint=str(answer.get("hint", "")))
    return answer


def format_time(at: float | None) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at)) if at else "-"


# A Slurm command in a message gets a prefix if it does not work in the user's shell without one.
_COMMANDS = ("sacct", "sacctmgr", "scancel", "scontrol", "sinfo", "sprio", "squeue")
_QUOTED = re.compile(rf"`(?=(?:{'|'.join(_COMMANDS)})\b)")


def shell_prefix(name: str | None = None, env: Mapping[str, str] = os.environ) -> str:
    """Return the prefix with which a Slurm command works in the user's shell, such as `dalsegno shell -- `; "" if the
    command works without one."""
    from dalsegno.cluster import places

    if name:
        return f"dalsegno shell --cluster {name} -- "
    has_one = env.get("SLURM_CONF") or not (env.get("DALSEGNO_CLUSTER") or places(env))
    return "" if has_one else "dalsegno shell -- "


def prefix_command(command: str, prefix: str) -> str:
    """Return a command of Slurm with the prefix. Return other commands unchanged."""
    return f"{prefix}{command}" if command.split(" ", 1)[0] in _COMMANDS else command


def prefix_commands(text: str) -> str:
    """Return a message with the prefix of `shell_prefix` before each Slurm command in backticks."""
    return _QUOTED.sub(f"`{shell_prefix()}", text) if _QUOTED.search(text) else text
