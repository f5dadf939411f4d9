"""A cluster file as plain values, each with the line it stands on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from dalsegno.errors import Problem
from dalsegno.spec.tree import Node, YamlKind, read_tree

Path = tuple[str | int, ...]

_NULL = {"", "~", "null"}
_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Not YAML 1.1's base-60 numbers (`1:30:00` is a time here) nor its octals (`010` is a trap).
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,3})?")
_MAX_DIGITS = 18
_TEXT_TAGS = {"!", "tag:yaml.org,2002:str"}
_KNOWN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "int", "float", "bool", "null")} | {""}


class Table(dict[str, Any]):
    """A mapping of the file that knows its own path, so that the model made from it does too."""

    path: Path = ()


@dataclass
class Document:
    """The values of one file, where each stands, and what was wrong with it so far."""

    filename: str
    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, path: Path) -> str:
        """`file:line` of the value at `path`, or of the nearest thing around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.filename}:{self.lines.get(path, 1)}"


def read_document(text: str, filename: str) -> Document:
    """The values in `text`. Raises SpecError where it is not YAML at all; lesser faults are kept in `problems`."""
    document = Document(filename)
    root = read_tree(text, filename)
    if root is not None:
        document.lines[()] = root.line
        document.data = _Reader(document).value(root, ())
    return document


class _Reader:
    """Turns nodes into values, noting lines and faults in the document."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def value(self, node: Node, path: Path) -> Any:
        if node.kind is YamlKind.MAPPING:
            return self._mapping(node, path)
        if node.kind is YamlKind.LIST:
            return [self._item(item, (*path, at)) for at, item in enumerate(node.items)]
        return self._scalar(node)

    def _item(self, node: Node, path: Path) -> Any:
        self.document.lines[path] = node.line
        return self.value(node, path)

    def _mapping(self, node: Node, path: Path) -> Table:
        table = Table()
        table.path = path
        merges: list[Node] = []
        for key, value in zip(node.items[::2], node.items[1::2], strict=True):
            if key.text == "<<" and key.plain:
                merges.append(value)
            elif self._is_name(key, path):
                self._put(table, key, value, path)
        for merge in merges:
            self._merge(table, merge, path)
        return table

    def _is_name(self, key: Node, path: Path) -> bool:
        if key.kind is YamlKind.SCALAR and (key.text.strip() or not key.plain):
            return True
        self._note("a key must be a name, not a list, a mapping or nothing", key.line)
        return False

    def _put(self, table: Table, key: Node, value: Node, path: Path) -> None:
        here = (*path, key.text)
        if key.text in table:
            self._note(f"`{key.text}` is given twice, first on line {self.document.lines[here]}", key.line, "keep one")
            return
        self.document.lines[here] = key.line
        table[key.text] = self.value(value, here)

    def _merge(self, table: Table, node: Node, path: Path) -> None:
        """`<<: *defaults`: what is not given here is taken from there."""
        for source in node.items if node.kind is YamlKind.LIST else [node]:
            if source.kind is not YamlKind.MAPPING:
                self._note("`<<` must name a mapping, or a list of them", source.line)
                continue
            for key, value in zip(source.items[::2], source.items[1::2], strict=True):
                if key.text == "<<" and key.plain:
                    self._merge(table, value, path)
                elif key.text not in table and self._is_name(key, path):
                    self._put(table, key, value, path)

    def _scalar(self, node: Node) -> str | int | float | bool | None:
        if node.tag not in _KNOWN_TAGS | _TEXT_TAGS:
            self._note(f"the tag `{node.tag}` means nothing here", node.line, "remove it")
        if not node.plain or node.tag in _TEXT_TAGS:
            return node.text
        return self._plain(node)

    def _plain(self, node: Node) -> str | int | float | bool | None:
        text = node.text
        lower = text.lower()
        if lower in _NULL:
            return None
        if lower in _BOOL:
            return _BOOL[lower]
        if _INT.fullmatch(text):
            return self._int(node)
        if _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
        return text

    def _int(self, node: Node) -> int:
        digits = node.text.replace("_", "")
        if len(digits) <= _MAX_DIGITS:
            return int(digits)
        self._note(f"the number {digits[:12]}… is too large", node.line)
        return 1

    def _note(self, what: str, line: int, hint: str = "") -> None:
        self.document.problems.append(Problem(what, f"{self.document.filename}:{line}", hint))
