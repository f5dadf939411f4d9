"""What pydantic complains of, said so that a person can mend it."""

from __future__ import annotations

from typing import Any

from pydantic_core import ErrorDetails

from dalsegno.hardware import did_you_mean
from dalsegno.spec.document import Path
from dalsegno.spec.section import Section, hint_unknown, show
from dalsegno.spec.wording import call_value

_EXAMPLES = {
    "name": "`name: demo`",
    "target": "`target: local`",
    "partitions": "`partitions: [{name: train, nodes: 4}]`",
}
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


def word_fault(error: ErrorDetails, path: Path, data: Any, root: type[Section]) -> tuple[str, str]:
    """What is wrong, and a hint. `path` is the place in `data`, without pydantic's own marks."""
    kind = error["type"]
    if kind == "extra_forbidden":
        return f"{call_value(path[:-1], data)} has no setting {show(path[-1])}", _unknown(root, path)
    if kind == "missing":
        key = str(path[-1])
        example = _EXAMPLES.get(key) if len(path) == 1 else None
        return f"{call_value(path[:-1], data)} needs `{key}`", f"add {example or f'`{key}:`'}"
    subject = call_value(path, data)
    if error["loc"][-1:] == ("[key]",):
        subject = f"a key of {call_value(path[:-1], data)}"
    what, hint = _predicate(error)
    return f"{subject} {what}", hint


def _unknown(root: type[Section], path: Path) -> str:
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
    return f"is wrong: {error['msg'].lower()}", ""


def _literal(expected: str, given: object) -> tuple[str, str]:
    words = [each.strip("' ") for each in expected.replace(" or ", ", ").split(",")]
    return f"must be one of {', '.join(words)}, not {show(given)}", did_you_mean(str(given), words)
