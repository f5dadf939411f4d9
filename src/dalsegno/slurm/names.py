"""Check names and ids before they are used in a command line, so that none of them can act as an option."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_JOB = re.compile(r"\d{1,10}(?:[_+]\d{1,10})?", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*", re.ASCII)


def node_list(nodes: str | Iterable[str]) -> str:
    """Return one or several nodes as a host list for Slurm's commands: `n[1-4]`."""
    names = [nodes] if isinstance(nodes, str) else list(nodes)
    for name in names:
        if not _NODE.fullmatch(name):
            raise DalsegnoError(f"invalid node name {name!r}", hint="`sinfo -N` lists the nodes")
    if not names:
        raise DalsegnoError("no node was given", hint="`sinfo -N` lists the nodes")
    return compress(names)


def job_id(job: int | str) -> str:
    """Return the job id if it is valid: `5`, `5_3` (an array task) or `5+1` (a component of a heterogeneous job)."""
    text = str(job)
    if not _JOB.fullmatch(text):
        raise DalsegnoError(f"invalid job id {text!r}", hint="`squeue` lists the jobs")
    return text


def word(kind: str, name: str) -> str:
    """Return the name of a QOS, account, user, partition or reservation if it is valid."""
    if not _WORD.fullmatch(name):
        raise DalsegnoError(f"invalid {kind} name {name!r}", hint="use letters, digits, `_`, `-` and `.`")
    return name


def free_text(text: str) -> str:
    """Return a reason or comment as one line without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
