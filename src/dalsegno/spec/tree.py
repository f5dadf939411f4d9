"""YAML text to a tree of nodes that remember their lines.

Built from the parser's events rather than by PyYAML's own composer: nesting and aliases are bounded here, so that
neither ten thousand brackets nor a "billion laughs" file can hurt us.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

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
class Node:
    """A place in the file: a scalar, a list (`items`) or a mapping (`items` are key, value, key, value …)."""

    kind: YamlKind
    line: int
    text: str = ""
    plain: bool = True  # written without quotes
    tag: str = ""
    items: list[Node] = field(default_factory=list)
    size: int = 1  # values inside, aliases unfolded
    height: int = 1

    def add(self, child: Node) -> None:
        self.items.append(child)
        self.size += child.size
        self.height = max(self.height, child.height + 1)


class _Builder:
    """Puts nodes together as the events come; refuses what is too deep, too large or not one document."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self.open: list[Node] = []
        self.anchors: dict[str, Node] = {}
        self.root: Node | None = None

    def take(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.ScalarEvent):
            plain = event.style is None or event.style == ""
            self._place(Node(YamlKind.SCALAR, line, event.value, plain, event.tag or ""), event.anchor)
        elif isinstance(event, (yaml.SequenceStartEvent, yaml.MappingStartEvent)):
            self._open(event, line)
        elif isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
            self._attach(self.open.pop(), line)
        elif isinstance(event, yaml.AliasEvent):
            self._attach(self._anchored(event.anchor, line), line)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise self._refuse("there is a second YAML document", line, "keep one cluster per file; remove the `---`")

    def _open(self, event: yaml.CollectionStartEvent, line: int) -> None:
        if len(self.open) >= MAX_DEPTH:
            raise self._refuse(f"the file is nested more than {MAX_DEPTH} levels deep", line)
        kind = YamlKind.LIST if isinstance(event, yaml.SequenceStartEvent) else YamlKind.MAPPING
        node = Node(kind, line, tag=event.tag or "")
        if event.anchor:
            self.anchors[event.anchor] = node
        self.open.append(node)

    def _anchored(self, name: str | None, line: int) -> Node:
        node = self.anchors.get(name or "")
        if node is None:
            raise self._refuse(f"alias `*{name}` has no anchor `&{name}` before it", line)
        if any(node is opened for opened in self.open):
            raise self._refuse(f"alias `*{name}` stands inside the very thing it names", line)
        return node

    def _place(self, node: Node, anchor: str | None) -> None:
        if anchor:
            self.anchors[anchor] = node
        self._attach(node, node.line)

    def _attach(self, node: Node, line: int) -> None:
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        parent.add(node)
        if parent.size > MAX_VALUES:
            raise self._refuse(f"the file unfolds to more than {MAX_VALUES:,} values", line)
        if parent.height + len(self.open) > MAX_DEPTH + 1:
            raise self._refuse(f"the file is nested more than {MAX_DEPTH} levels deep", line)

    def _refuse(self, what: str, line: int, hint: str = "") -> SpecError:
        return SpecError([Problem(what, f"{self.filename}:{line}", hint)])


def read_tree(text: str, filename: str) -> Node | None:
    """The tree of the one document in `text`, None for an empty one. Raises SpecError on anything that is not YAML."""
    builder = _Builder(filename)
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
            [Problem(f"not valid YAML: {error}", f"{filename}:1", "`dalsegno init` writes a file to start from")]
        ) from None


def _unreadable(error: yaml.reader.ReaderError, text: str, filename: str) -> Problem:
    # The C reader counts bytes, the Python one characters.
    line = text.encode("utf-8", "replace")[: error.position].count(b"\n") + 1
    return Problem("there is a character that YAML does not allow", f"{filename}:{line}", "is this a text file?")


def _syntax(error: yaml.MarkedYAMLError, filename: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    said = " ".join(part for part in (error.context, error.problem) if part)
    tab = "cannot start any token" in said
    hint = "indent with spaces, not tabs, and quote text that starts with a special character" if tab else ""
    return Problem(f"not valid YAML: {said}", f"{filename}:{line}", hint or "check the indentation and brackets there")
