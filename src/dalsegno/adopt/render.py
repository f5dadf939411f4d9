"""Write the content of a cluster file as YAML that is certain to be valid. Values that break a rule become remarks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from dalsegno.adopt.describe import Content, Description
from dalsegno.errors import DalsegnoError, SpecError
from dalsegno.printable import one_line
from dalsegno.spec.load import MAX_BYTES, parse_spec

ContentPath = tuple[str | int, ...]
# If the value of one of these keys is invalid, the list item that contains the key is left out.
_ESSENTIAL = ("name", "nodes", "node_count", "switches")
_KEPT = ("name", "target", "existing", "partitions")  # required in every cluster file
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./\[\]-]*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})  # YAML reads these as other types
_LONG = ("users", "accounts")  # these lists are left out if the file would be too long
_ROUNDS = 50
_WIDTH = 1 << 30  # so wide that each value stays on one line


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text that is not a plain word, so that each text stays on one line."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS and "[" not in text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


def render_valid(description: Description, header: str, filename: str = "cluster.yaml") -> str:
    """Return the text of a cluster file that passes `dalsegno validate`.

    Values that the file does not allow are removed one by one, and listed in comments at its end.
    """
    content, remarks = description.content, list(description.remarks)
    for _ in range(_ROUNDS):
        lines = list(_emit(content, ()))
        text = "".join(f"{line}\n" for line, _ in lines)
        if len(text) > MAX_BYTES // 2 and (long := next((key for key in _LONG if key in content), "")):
            remarks.append(f"left out of this file: {len(content[long])} {long}, because it would be too long")
            content = {key: value for key, value in content.items() if key != long}
            continue
        try:
            parse_spec(text, filename)
        except SpecError as error:
            content = _without(content, lines, error, remarks)
            continue
        return _comment([header]) + text + _remark_lines(remarks)
    raise DalsegnoError("the cluster could not be described", hint="report this, with `scontrol show config`")


def with_armed(text: str, armed: list[str]) -> str | None:
    """Return the text of a cluster file with `armed` as its list of armed partitions; None if the text has no such
    list."""
    pattern = re.compile(r"^(health:\n(?:[ #].*\n)*?  armed:)[ \t]*\[[^\]\n]*\]", re.MULTILINE)
    if not pattern.search(text):
        return None
    return pattern.sub(lambda found: f"{found[1]} {_word(armed)}", text, count=1)


def _without(content: Content, lines: list[tuple[str, ContentPath]], error: SpecError, remarks: list[str]) -> Content:
    """Return the content without the values that `error` reports as invalid."""
    cut: dict[ContentPath, str] = {}
    for problem in error.problems:
        path = _removable(lines[problem.line - 1][1]) if 0 < problem.line <= len(lines) else ()
        if not path:
            raise DalsegnoError(f"the cluster could not be described: {problem.what}", hint=problem.hint)
        cut.setdefault(path, problem.what)
    remarks += [f"left out of this file: {what}" for what in cut.values()]
    left: Content = _cut(content, (), cut)
    return left


def _removable(path: ContentPath) -> ContentPath:
    """Return the path to remove because of an invalid value; () if the file needs the value.

    If the value is in a list item that needs it, return the path of the item.
    """
    items = [at for at, step in enumerate(path) if isinstance(step, int)]
    if items and (len(path) == items[-1] + 1 or path[items[-1] + 1] in _ESSENTIAL):
        return path[: items[-1] + 1]
    if len(path) == 1 and path[0] in _KEPT:
        return ()
    return path


def _cut(value: Any, path: ContentPath, cut: dict[ContentPath, str]) -> Any:
    if isinstance(value, dict):
        kept = {key: _cut(inner, (*path, key), cut) for key, inner in value.items() if (*path, key) not in cut}
        return {key: inner for key, inner in kept.items() if inner not in ({}, []) or value[key] == inner}
    if isinstance(value, list):
        return [_cut(inner, (*path, at), cut) for at, inner in enumerate(value) if (*path, at) not in cut]
    return value


def _emit(value: Content, path: ContentPath, indent: str = "") -> Iterator[tuple[str, ContentPath]]:
    """Yield each line of YAML with the path of its value. A value that is not divided further is on one line."""
    for key, inner in value.items():
        here = (*path, key)
        if isinstance(inner, dict) and inner and len(path) < 2:
            yield f"{indent}{_word(key)}:", here
            yield from _emit(inner, here, f"{indent}  ")
        elif isinstance(inner, list) and inner and all(isinstance(item, dict) for item in inner):
            yield f"{indent}{_word(key)}:", here
            for at, item in enumerate(inner):
                yield from _emit_item(item, (*here, at), f"{indent}  ")
        else:
            yield f"{indent}{_word(key)}: {_word(inner)}", here


def _emit_item(item: Content, path: ContentPath, indent: str) -> Iterator[tuple[str, ContentPath]]:
    for number, (line, at) in enumerate(_emit(item, path, f"{indent}  ")):
        yield (f"{indent}- {line[len(indent) + 2 :]}" if not number else line), at


def _word(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.dump([value], Dumper=_Dumper, default_flow_style=True, width=_WIDTH, sort_keys=False)
    return text.strip()[1:-1]


def _remark_lines(remarks: list[str]) -> str:
    if not remarks:
        return ""
    return "\n" + _comment(["What this file cannot express:", *(f"- {each}" for each in dict.fromkeys(remarks))])


def _comment(lines: list[str]) -> str:
    return "".join(f"# {one_line(part)}\n" for line in lines for part in line.split("\n"))
