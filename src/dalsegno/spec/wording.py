"""How a value of the cluster file is called in a message: "`nodes` of partition `train`", "`slurm.priority.age`"."""

from __future__ import annotations

from typing import Any

from dalsegno.spec.document import Path, Table
from dalsegno.spec.section import show

# Lists of named things, and what one of them is called.
_NOUNS = {
    "partitions": "partition",
    "reservations": "reservation",
    "accounts": "account",
    "users": "user",
    "storage": "storage",
    "qos": "qos",
    "switches": "switch",
}


def call_value(path: Path, data: Any) -> str:
    """The value at `path` as the subject of a sentence."""
    owner, rest = _split(path, data)
    if not rest:
        return owner or "the cluster file"
    return f"`{rest}` of {owner}" if owner else f"`{rest}`"


def _split(path: Path, data: Any) -> tuple[str, str]:
    """The innermost named thing on the path, and what is left of the path below it, dotted."""
    owner, start = "", 0
    value = data
    for at, step in enumerate(path):
        value = _inside(value, step)
        noun = _NOUNS.get(str(path[at - 1])) if at else None
        # A plain word in a list (`allow_qos: [high]`) is no thing of its own.
        if isinstance(step, int) and noun and (isinstance(value, Table) or at == 1):
            owner, start = _name(noun, value, step), at + 1
    return owner, ".".join(step[:60] for step in path[start:] if isinstance(step, str))


def _inside(value: Any, step: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(step)
    return value[step] if isinstance(value, list) and isinstance(step, int) and step < len(value) else None


def _name(noun: str, item: Any, index: int) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    return f"{noun} {show(name)}" if isinstance(name, str) and name else f"{noun} {index + 1}"
