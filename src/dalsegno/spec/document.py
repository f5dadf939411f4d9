"""Read a cluster file into plain values, each with its line number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import yaml

from dalsegno.errors import Problem, SpecError

MAX_DEPTH = 40
MAX_VALUES = 100_000

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlKind(Enum):
    """The kinds of YAML nodes."""

    SCALAR = "scalar"
    LIST = "list"
    MAPPING = "mapping"


@dataclass
class YamlNode:
    """A YAML node with its line: a scalar, a list (`items`) or a mapping (`items` are key, value, key, value …)."""

    kind: YamlKind
    line: int
    text: str = ""
    plain: bool = True  # whether the scalar is written without quotes
    tag: str = ""
    items: list[YamlNode] = field(default_factory=list)
    size: int = 1  # number of values in the node, with aliases expanded
    height: int = 1

    def add(self, child: YamlNode) -> None:
        self.items.append(child)
        self.size += child.size
        self.height = max(self.height, child.height + 1)


class _TreeBuilder:
    """Builds the tree from YAML events, and raises SpecError if the file is too deep, too large or not one document."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.open: list[YamlNode] = []
        self.anchors: dict[str, YamlNode] = {}
        self.root: YamlNode | None = None

    def take(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.ScalarEvent):
            plain = event.style is None or event.style == ""
            self._place(YamlNode(YamlKind.SCALAR, line, event.value, plain, event.tag or ""), event.anchor)
        elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            self._open(event, line)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            self._attach(self.open.pop(), line)
        elif isinstance(event, yaml.AliasEvent):
            self._attach(self._anchored(event.anchor, line), line)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise self._refuse(
                "the file has a second YAML document", line, "keep one cluster per file; remove the `---`"
            )

    def _open(self, event: yaml.CollectionStartEvent, line: int) -> None:
        if len(self.open) >= MAX_DEPTH:
            raise self._refuse(f"the file is nested more than {MAX_DEPTH} levels deep", line)
        kind = YamlKind.LIST if isinstance(event, yaml.SequenceStartEvent) else YamlKind.MAPPING
        node = YamlNode(kind, line, tag=event.tag or "")
        if event.anchor:
            self.anchors[event.anchor] = node
        self.open.append(node)

    def _anchored(self, name: str | None, line: int) -> YamlNode:
        node = self.anchors.get(name or "")
        if node is None:
            raise self._refuse(f"alias `*{name}` has no anchor `&{name}` before it", line)
        if any(node is opened for opened in self.open):
            raise self._refuse(f"alias `*{name}` refers to a value that contains it", line)
        return node

    def _place(self, node: YamlNode, anchor: str | None) -> None:
        if anchor:
            self.anchors[anchor] = node
        self._attach(node, node.line)

    def _attach(self, node: YamlNode, line: int) -> None:
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        parent.add(node)
        if parent.size > MAX_VALUES:
            raise self._refuse(f"the file expands to more than {MAX_VALUES:,} values", line)
        if parent.height + len(self.open) > MAX_DEPTH + 1:
            raise self._refuse(f"the file is nested more than {MAX_DEPTH} levels deep", line)

    def _refuse(self, what: str, line: int, hint: str = "") -> SpecError:
        return SpecError([Problem(what, self.filename, hint, line)])


def read_tree(text: str, filename: str) -> YamlNode | None:
    """Return the tree of the only document in `text`; None if it is empty. Raise SpecError if it is not valid YAML."""
    builder = _TreeBuilder(filename)
    for event in _events(text, filename):
        builder.take(event)
    root = builder.root
    empty = root is None or (root.kind is YamlKind.SCALAR and not root.text.strip() and root.plain)
    return None if empty else root


def _events(text: str, filename: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=_LOADER)
    except yaml.reader.ReaderError as error:
        raise SpecError([_unreadable(error, text, filename)]) from None
    except yaml.MarkedYAMLError as error:
        raise SpecError([_syntax(error, filename)]) from None
    except yaml.YAMLError as error:
        raise SpecError(
            [Problem(f"not valid YAML: {error}", filename, "`dalsegno init` writes a file to start from", 1)]
        ) from None


def _unreadable(error: yaml.reader.ReaderError, text: str, filename: str) -> Problem:
    # The C reader reports the position in bytes. The Python reader reports it in characters, so the line
    # number may be too small.
    line = text.encode("utf-8", "replace")[: error.position].count(b"\n") + 1
    what = "the file has a character that YAML does not allow"
    return Problem(what, filename, "check that this is a text file", line)


def _syntax(error: yaml.MarkedYAMLError, filename: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    reason = " ".join(part for part in (error.context, error.problem) if part)
    tab = "cannot start any token" in reason
    hint = "indent with spaces, not tabs, and quote text that starts with a special character" if tab else ""
    return Problem(f"not valid YAML: {reason}", filename, hint or "check the indentation and brackets there", line)


KeyPath = tuple[str | int, ...]

_NULL = {"", "~", "null"}
_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# The base-60 numbers and octals of YAML 1.1 are read as text, so that `1:30:00` is a time and `010` is not 8.
_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]{1,3})?")
_MAX_DIGITS = 18
_TEXT_TAGS = {"!", "tag:yaml.org,2002:str"}
_KNOWN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "int", "float", "bool", "null")} | {""}


class Table(dict[str, Any]):
    """A mapping in the file, with its path. A section that is built from this mapping keeps the path."""

    path: KeyPath = ()


@dataclass
class Document:
    """The values of one file, their lines, and the problems found so far."""

    filename: str
    data: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, path: KeyPath) -> int:
        """Return the line of the value at `path`, or of its closest parent that has a line."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def problem(self, what: str, path: KeyPath, hint: str) -> Problem:
        """Return a problem with the value at `path`."""
        return Problem(what, self.filename, hint, self.line(path))


def read_document(text: str, filename: str) -> Document:
    """Return the values in `text`. Raise SpecError if it is not valid YAML; add other errors to `problems`."""
    document = Document(filename)
    root = read_tree(text, filename)
    if root is not None:
        document.lines[()] = root.line
        document.data = _DocumentReader(document).value(root, ())
    return document


class _DocumentReader:
    """Converts nodes to values and records lines and problems in the document."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def value(self, node: YamlNode, path: KeyPath) -> Any:
        if node.kind is YamlKind.MAPPING:
            return self._mapping(node, path)
        if node.kind is YamlKind.LIST:
            return [self._item(item, (*path, at)) for at, item in enumerate(node.items)]
        return self._scalar(node)

    def _item(self, node: YamlNode, path: KeyPath) -> Any:
        self.document.lines[path] = node.line
        return self.value(node, path)

    def _mapping(self, node: YamlNode, path: KeyPath) -> Table:
        table = Table()
        table.path = path
        merges: list[YamlNode] = []
        for key, value in zip(node.items[::2], node.items[1::2], strict=True):
            if key.text == "<<" and key.plain:
                merges.append(value)
            elif self._is_name(key, path):
                self._put(table, key, value, path)
        for merge in merges:
            self._merge(table, merge, path)
        return table

    def _is_name(self, key: YamlNode, path: KeyPath) -> bool:
        if key.kind is YamlKind.SCALAR and (key.text.strip() or not key.plain):
            return True
        self._note("a key must be a name, not a list, a mapping or nothing", key.line)
        return False

    def _put(self, table: Table, key: YamlNode, value: YamlNode, path: KeyPath) -> None:
        here = (*path, key.text)
        if key.text in table:
            self._note(f"`{key.text}` is given twice, first on line {self.document.lines[here]}", key.line, "keep one")
            return
        self.document.lines[here] = key.line
        table[key.text] = self.value(value, here)

    def _merge(self, table: Table, node: YamlNode, path: KeyPath) -> None:
        """Merge `<<: *defaults` by adding the keys that this mapping does not have."""
        for source in node.items if node.kind is YamlKind.LIST else [node]:
            if source.kind is not YamlKind.MAPPING:
                self._note("`<<` must name a mapping, or a list of them", source.line)
                continue
            for key, value in zip(source.items[::2], source.items[1::2], strict=True):
                if key.text == "<<" and key.plain:
                    self._merge(table, value, path)
                elif key.text not in table and self._is_name(key, path):
                    self._put(table, key, value, path)

    def _scalar(self, node: YamlNode) -> str | int | float | bool | None:
        if node.tag not in _KNOWN_TAGS | _TEXT_TAGS:
            self._note(f"the tag `{node.tag}` is not supported", node.line, "remove it")
        if not node.plain or node.tag in _TEXT_TAGS:
            return node.text
        return self._plain(node)

    def _plain(self, node: YamlNode) -> str | int | float | bool | None:
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

    def _int(self, node: YamlNode) -> int:
        digits = node.text.replace("_", "")
        if len(digits) <= _MAX_DIGITS:
            return int(digits)
        self._note(f"the number {digits[:12]}… is too large", node.line)
        return 1

    def _note(self, what: str, line: int, hint: str = "") -> None:
        self.document.problems.append(Problem(what, self.document.filename, hint, line))
