"""Slurm's own commands in what we tell a user: written so that they work in the shell the user is in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

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
