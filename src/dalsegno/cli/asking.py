"""Asking a cluster's controller, and what it says turned into words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dalsegno.cli.silence import no_cluster
from dalsegno.errors import DalsegnoError

if TYPE_CHECKING:
    from pathlib import Path

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
