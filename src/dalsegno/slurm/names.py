"""Names and ids, checked before they get into a command line: what looks like an option is none."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_JOB = re.compile(r"\d{1,10}(?:[_+]\d{1,10})?", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*", re.ASCII)


def node_list(nodes: str | Iterable[str]) -> str:
    """One node or several as Slurm's commands take them: `n[1-4]`."""
    names = [nodes] if isinstance(nodes, str) else list(nodes)
    for name in names:
        if not _NODE.fullmatch(name):
            raise DalsegnoError(f"{name!r} is not a node's name", hint="`sinfo -N` lists them")
    if not names:
        raise DalsegnoError("no node was named", hint="`sinfo -N` lists them")
    return compress(names)


def job_id(job: int | str) -> str:
    """`5`, `5_3` (a task of an array) or `5+1` (a part of a heterogeneous job)."""
    text = str(job)
    if not _JOB.fullmatch(text):
        raise DalsegnoError(f"{text!r} is not a job id", hint="`squeue` lists them")
    return text


def word(kind: str, name: str) -> str:
    """The name of a QOS, account, user, partition, reservation."""
    if not _WORD.fullmatch(name):
        raise DalsegnoError(
            f"{name!r} is not a name Slurm takes for a {kind}", hint="use letters, digits, `_`, `-` and `.`"
        )
    return name


def free_text(text: str) -> str:
    """A reason or comment: one line, no control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))
