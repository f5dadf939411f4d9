"""Load a cluster file and report all errors in it at once."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dalsegno.errors import Problem, SpecError, UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.spec.checks import run_checks
from dalsegno.spec.checks.report import Problems
from dalsegno.spec.document import Document, KeyPath, Table, read_document
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.section import Section, hint_unknown, meant_key, one_line, show
from dalsegno.spec.targets import TARGETS

# list of named sections -> the noun for one entry
_NOUNS = {
    "partitions": "partition",
    "reservations": "reservation",
    "accounts": "account",
    "users": "user",
    "groups": "group",
    "storage": "storage",
    "qos": "qos",
    "switches": "switch",
}


def name_value(path: KeyPath, data: Any) -> str:
    """Return a name for the value at `path`: "`nodes` of partition `train`" or "`slurm.priority.age`"."""
    owner, rest = _split(path, data)
    if not rest:
        return owner or "the cluster file"
    return f"`{rest}` of {owner}" if owner else f"`{rest}`"


def _split(path: KeyPath, data: Any) -> tuple[str, str]:
    """Return the innermost named section on the path, and the rest of the path in dotted notation."""
    owner, start = "", 0
    value = data
    for at, step in enumerate(path):
        value = _inside(value, step)
        noun = _NOUNS.get(str(path[at - 1])) if at else None
        # A plain word in a list (`allow_qos: [high]`) is not a section.
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


_EXAMPLES = {
    "name": "`name: demo`",
    "target": "`target: local`",
    "partitions": "`partitions: [{name: train, nodes: 4}]`",
}
_EXAMPLES_IN: dict[KeyPath, str] = {("oci", "ad"): "`ad:`; `oci iam availability-domain list` shows the names"}
_TYPES = {
    "string_type": ("text", "put it in quotes"),
    "int_type": ("a whole number", ""),
    "int_from_float": ("a whole number", ""),
    "float_type": ("a number", ""),
    "finite_number": ("a number", ""),
    "bool_type": ("`true` or `false`", ""),
    "list_type": ("a list", "start each entry with `- `"),
    "dict_type": ("a mapping", "write `key: value` lines below it"),
    "model_type": ("a mapping", "write `key: value` lines below it"),
    "model_attributes_type": ("a mapping", "write `key: value` lines below it"),
}
_RANGES = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def describe_error(error: ErrorDetails, path: KeyPath, data: Any, root: type[Section]) -> tuple[str, str]:
    """Return a message and a hint for a pydantic error at `path` in `data`."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{name_value(path[:-1], data)} has no setting {show(path[-1])}", _unknown(root, path)
    if kind == "missing":
        key = str(path[-1])
        example = _EXAMPLES.get(key) if len(path) == 1 else _EXAMPLES_IN.get(tuple(path))
        if path == ("target",) and (block := next((name for name in TARGETS if name in data), None)):
            example = f"`target: {block}`"
        return f"{name_value(path[:-1], data)} needs `{key}`", f"add {example or f'`{key}:`'}"
    subject = name_value(path, data)
    if error["loc"][-1:] == ("[key]",):
        subject = f"a key of {name_value(path[:-1], data)}"
    what, hint = _predicate(error)
    return f"{subject} {what}", hint


def _unknown(root: type[Section], path: KeyPath) -> str:
    return hint_unknown(root, path[:-1], str(path[-1]))


def _predicate(error: ErrorDetails) -> tuple[str, str]:
    kind, context, given = error["type"], error.get("ctx", {}), show(error["input"])
    if kind == "fault":
        return context["what"], context["hint"]
    if kind in _TYPES:
        wanted, hint = _TYPES[kind]
        return f"must be {wanted}, not {given}", hint
    if kind in _RANGES:
        words, key = _RANGES[kind]
        return f"must be {words} {context[key]}, not {given}", ""
    if kind == "too_long":
        return f"has {context['actual_length']} entries; at most {context['max_length']} are allowed", ""
    if kind == "literal_error":
        return _literal(context["expected"], error["input"])
    return f"is invalid: {error['msg'].lower()}", ""


def _literal(expected: str, given: object) -> tuple[str, str]:
    words = [each.strip("' ") for each in expected.replace(" or ", ", ").split(",")]
    return f"must be one of {', '.join(words)}, not {show(given)}", did_you_mean(str(given), words)


_ROUNDS = 20  # maximum number of rounds, each of which removes all invalid values that pydantic reports
_PLACEHOLDERS: dict[str, Any] = {"name": "unnamed", "target": "local", "partitions": []}
_Loc = tuple[int | str, ...]


@dataclass
class ValidPart:
    """The valid part of a file, and the paths that were removed, so that one error does not hide others."""

    spec: ClusterSpec | None = None
    cut: set[KeyPath] = field(default_factory=set)


def salvage(document: Document) -> ValidPart:
    """Return the valid part of the document's data as a spec, and add errors to the document's problems."""
    result = ValidPart()
    for _ in range(_ROUNDS):
        try:
            result.spec = ClusterSpec.model_validate(document.data)
            return result
        except ValidationError as refused:
            _cut_all(refused.errors(include_url=False), document, result.cut)
    return result


def _cut_all(errors: list[ErrorDetails], document: Document, cut: set[KeyPath]) -> None:
    to_remove: dict[tuple[int, str | int], tuple[Any, str | int, bool]] = {}
    # Unknown keys come first, because they show which missing keys are merely misspelt.
    for error in sorted(errors, key=lambda each: each["type"] != "extra_forbidden"):
        loc = _clean(error["loc"])
        blank = _is_blank(loc, error, document.data)
        if not blank:
            _note(error, loc, document, cut)
        container, key = _cut_point(loc, error["type"] == "missing", document.data)
        to_remove[id(container), key] = (container, key, blank)
    # Remove values from the end, so that the indices of earlier entries in the same list stay valid.
    for container, key, blank in sorted(to_remove.values(), key=lambda each: str(each[1]).zfill(9), reverse=True):
        _remove(container, key, placeholder=not blank)


def _note(error: ErrorDetails, loc: _Loc, document: Document, cut: set[KeyPath]) -> None:
    path = _place_of(loc, document.data)
    missing = error["type"] == "missing"
    what, hint = describe_error(error, loc, document.data, ClusterSpec)
    # If a required value was invalid or its key misspelt, that error has already been reported.
    if not (missing and path in cut):
        document.problems.append(document.problem(what, path, hint))
    cut.add(path)
    if missing:
        cut.add(_place_of(loc[:-1], document.data))
    meant = meant_key(ClusterSpec, loc[:-1], str(loc[-1])) if error["type"] == "extra_forbidden" else ""
    if meant and meant not in _value_at(loc[:-1], document.data):
        cut.add((*path[:-1], meant))


def _clean(loc: _Loc) -> _Loc:
    return tuple(step for step in loc if step != "[key]")


def _place_of(loc: _Loc, data: Any) -> KeyPath:
    """Return the path in the file for `loc` in the data. The two differ if values were removed from the data."""
    path: KeyPath = ()
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
    """Return whether `key:` has no value, which counts as not given. An unknown key is always an error."""
    if error["type"] in ("missing", "extra_forbidden") or error["input"] is not None:
        return False
    return isinstance(_value_at(loc[:-1], data), dict)


def _cut_point(loc: _Loc, missing: bool, data: Any) -> tuple[Any, str | int]:
    """Return the container and key to remove: those of the value itself, or of the section that lacks a value."""
    best: tuple[Any, str | int] = (data, loc[0])
    value = data
    for step in loc[:-1] if missing and len(loc) > 1 else loc:
        # From a list of sections, remove one entry. Remove a list of words as a whole.
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, Table) for item in value)):
            best = (value, step)
        value = _step(value, step)
    return best


def _remove(container: Any, key: str | int, placeholder: bool) -> None:
    if isinstance(container, list):
        del container[int(key)]
        return
    container.pop(key, None)
    if placeholder and container.path == () and key in _PLACEHOLDERS:
        container[key] = _PLACEHOLDERS[str(key)]


MAX_BYTES = 1024 * 1024
_INIT = "`dalsegno init` writes a starter file"


def load_spec(path: str | os.PathLike[str]) -> ClusterSpec:
    """Load the cluster file at `path`. Raise SpecError with all problems in it."""
    name = os.fspath(path)
    return parse_spec(_read(name), name)


_S = TypeVar("_S", bound=Section)


def validate_section(kind: type[_S], values: dict[str, Any]) -> _S:
    """Return a section from a command's options. Raise UsageError if they break the rules of the cluster file."""
    try:
        return kind.model_validate(values)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
        what, hint = _predicate(error)
        name = error["loc"][0]
        hint = one_line(hint) or f"docs/cluster-file.md describes what `{name}` takes"
        raise UsageError(f"`{name}` {one_line(what)}", hint=hint) from None


def parse_spec(text: str, filename: str = "cluster.yaml") -> ClusterSpec:
    """Parse the cluster file in `text`. Raise SpecError with all problems in it. `filename` is used in messages."""
    document = read_document(text, filename)
    if not isinstance(document.data, Table):
        raise SpecError([_not_a_mapping(document)])
    # Top-level `x-…` keys are removed, because they are for the user's own anchors.
    for key in [key for key in document.data if key.startswith("x-")]:
        del document.data[key]
    written = copy.deepcopy(document.data)
    salvaged = salvage(document)
    if salvaged.spec is not None:
        run_checks(salvaged.spec, Problems(document, salvaged.cut, written))
    if document.problems or salvaged.spec is None:
        raise SpecError(_in_order(document.problems))
    return salvaged.spec


def _read(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise SpecError([Problem("the file is larger than 1 MiB", name, "check that this is a cluster file")])
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError([Problem("the file does not exist", name, _INIT)]) from None
    except IsADirectoryError:
        raise SpecError([Problem("this is a folder, not a file", name, "name the cluster file in it")]) from None
    except UnicodeDecodeError:
        raise SpecError([Problem("the file is not UTF-8 text", name, _INIT)]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecError(
            [Problem(f"the file cannot be read: {reason}", name, "check the path and its permissions")]
        ) from None


def _not_a_mapping(document: Document) -> Problem:
    if document.data is None and not document.lines:
        return Problem("the file is empty", document.filename, _INIT)
    what = "a cluster file is a mapping with `name`, `target` and `partitions`"
    return document.problem(what, (), _INIT)


def _in_order(problems: list[Problem]) -> list[Problem]:
    """Sort problems by line, without duplicates, and keep every message on one line."""
    clean = (replace(each, what=one_line(each.what), hint=one_line(each.hint)) for each in problems)
    return sorted(dict.fromkeys(clean), key=lambda problem: problem.line)
