"""As much of a faulty file as makes sense, so that one mistake does not hide the others.

What pydantic refuses is noted and cut out, and the rest is read again. What was cut is remembered: a check that would
have looked at it stays silent rather than complain about what the user did in fact write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dalsegno.errors import Problem
from dalsegno.spec.document import Document, Path, Table
from dalsegno.spec.faults import word_fault
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.section import meant_key

_ROUNDS = 20  # each round cuts at least one thing; nesting is shallow
_STAND_INS: dict[str, Any] = {"name": "unnamed", "target": "local", "partitions": []}
_Loc = tuple[int | str, ...]


@dataclass
class Salvaged:
    """What could be read, and the paths of what could not."""

    spec: ClusterSpec | None = None
    cut: set[Path] = field(default_factory=set)


def salvage(document: Document) -> Salvaged:
    """Reads the document's data into a spec; faults go to the document's problems."""
    result = Salvaged()
    for _ in range(_ROUNDS):
        try:
            result.spec = ClusterSpec.model_validate(document.data)
            return result
        except ValidationError as refused:
            _cut_all(refused.errors(include_url=False), document, result.cut)
    return result


def _cut_all(errors: list[ErrorDetails], document: Document, cut: set[Path]) -> None:
    doomed: dict[tuple[int, str | int], tuple[Any, str | int, bool]] = {}
    # Unknown keys first: they tell which missing ones are only misspelt.
    for error in sorted(errors, key=lambda each: each["type"] != "extra_forbidden"):
        loc = _clean(error["loc"])
        blank = _is_blank(loc, error, document.data)
        if not blank:
            _note(error, loc, document, cut)
        container, key = _cut_point(loc, error["type"] == "missing", document.data)
        doomed[id(container), key] = (container, key, blank)
    # From the back, so that earlier indices of the same list stay true.
    for container, key, blank in sorted(doomed.values(), key=lambda each: str(each[1]).zfill(9), reverse=True):
        _remove(container, key, stand_in=not blank)


def _note(error: ErrorDetails, loc: _Loc, document: Document, cut: set[Path]) -> None:
    path = _place_of(loc, document.data)
    missing = error["type"] == "missing"
    what, hint = word_fault(error, loc, document.data, ClusterSpec)
    # A required value that was there, but faulty or under another name, has been complained of already.
    if not (missing and path in cut):
        document.problems.append(Problem(what, document.where(path), hint))
    cut.add(path)
    if missing:
        cut.add(_place_of(loc[:-1], document.data))
    meant = meant_key(ClusterSpec, loc[:-1], str(loc[-1])) if error["type"] == "extra_forbidden" else ""
    if meant and meant not in _value_at(loc[:-1], document.data):
        cut.add((*path[:-1], meant))


def _clean(loc: _Loc) -> _Loc:
    return tuple(step for step in loc if step != "[key]")


def _place_of(loc: _Loc, data: Any) -> Path:
    """Where in the file `loc` of the data (which may have been cut) stood."""
    path: Path = ()
    value = data
    for step in loc:
        value = _step(value, step)
        path = value.path if isinstance(value, Table) else (*path, step)
    return path


def _step(value: Any, step: str | int) -> Any:
    try:
        return value[step]
    except (KeyError, IndexError, TypeError):
        return None


def _value_at(loc: _Loc, data: Any) -> Any:
    return reduce(_step, loc, data)


def _is_blank(loc: _Loc, error: ErrorDetails, data: Any) -> bool:
    """`key:` with nothing after it, which is as good as not there. (An unknown key is wrong, blank or not.)"""
    if error["type"] in ("missing", "extra_forbidden") or error["input"] is not None:
        return False
    return isinstance(_value_at(loc[:-1], data), dict)


def _cut_point(loc: _Loc, missing: bool, data: Any) -> tuple[Any, str | int]:
    """The container and key to remove: the value itself, or the whole thing that lacks something."""
    best: tuple[Any, str | int] = (data, loc[0])
    value = data
    for step in loc[:-1] if missing and len(loc) > 1 else loc:
        # One entry out of a list of things; of a list of words, all of it.
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, Table) for item in value)):
            best = (value, step)
        value = _step(value, step)
    return best


def _remove(container: Any, key: str | int, stand_in: bool) -> None:
    if isinstance(container, list):
        del container[int(key)]
        return
    container.pop(key, None)
    if stand_in and container.path == () and key in _STAND_INS:
        container[key] = _STAND_INS[str(key)]
