"""Rules on source text: which code compares messages, and which states are plain strings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# Two words with a space between them. Identifiers, keys, options and paths have none.
SENTENCE = re.compile(r"[A-Za-z]{2}[^\s\w]* +[^\s\w]*[A-Za-z]{2}|^(?:error|hint|warning): ?$")  # `error:` is our own
TESTS = {
    "startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit", "find",
    "rfind", "index", "rindex", "count", "compile", "match", "search", "fullmatch", "findall", "finditer",
}  # fmt: skip
# Names of values that hold text for people, and of our own `file:line`
MESSAGES = {"text", "said", "sentence", "summary", "message", "detail", "why", "hint", "where", "trouble"}
STATES = {"phase", "state", "status", "stage", "kind", "role", "cause", "what"}


class Module(NamedTuple):
    """A parsed module: its dotted name, its statements, and all nodes of its tree."""

    name: str
    file: str
    body: Sequence[ast.stmt]
    nodes: Sequence[ast.AST]


def constants_of(modules: Iterable[Module]) -> dict[str, tuple[str, ...]]:
    """Return the sentences in each module's constants, by full name. In a dict only the keys count."""
    found: dict[str, tuple[str, ...]] = {}
    for module in modules:
        for node in module.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                sentences = tuple(_sentences(node.value))
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)):
                    if sentences:
                        found[f"{module.name}.{name}"] = sentences
    return found


def decisions_on_prose(module: Module, constants: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return where a module compares text with a sentence, or searches text for a sentence."""
    known = {name: f"{module.name}.{name}" for name in _names_of(module)} | dict(_imported(module))
    known |= dict(_looped_over(module, known))
    faults = []
    for node in module.nodes:
        for part in _compared(node):
            sentences = list(_sentences(part)) or list(constants.get(_full_name(part, known), ()))
            faults += [f"{module.file}:{part.lineno}: {sentence!r}" for sentence in sentences[:1]]
    return sorted(set(faults))


def decisions_on_messages(module: Module) -> list[str]:
    """Return where a module compares a value that holds a message with another one, or parses such a value.

    Comparisons with a constant are left to `decisions_on_prose`: a single word may be a keyword.
    """
    comparisons = [node for node in module.nodes if isinstance(node, ast.Compare) and _compares_messages(node)]
    searches = [node for node in module.nodes if isinstance(node, ast.Call) and _takes_apart(node)]
    return sorted(f"{module.file}:{node.lineno}: {ast.unparse(node)}" for node in (*comparisons, *searches))


def _compares_messages(node: ast.Compare) -> bool:
    sides = (node.left, *node.comparators)
    searched = any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops)
    equal = any(isinstance(op, (ast.Eq, ast.NotEq)) for op in node.ops)
    # A local variable with such a name often holds the output of another program, so only `in` and `not in` count for
    # it. A variable `message` holds a message of a protocol.
    held = any(
        searched and side.id in MESSAGES - {"message"} if isinstance(side, ast.Name) else _message_name(side)
        for side in sides
    )
    return (searched or equal) and held and not any(_is_constant(side) for side in sides)


def _takes_apart(node: ast.Call) -> bool:
    """Return whether a call searches a message. Taking the first line of a message is not a decision."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in TESTS - {"split", "rsplit", "compile"}:
        return False
    return bool(_message_name(node.func.value)) and not (
        node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == "\n"
    )


def _message_name(node: ast.expr) -> str:
    """Return the name of an attribute or a called method that holds a message; "" for other expressions."""
    named = node.func if isinstance(node, ast.Call) else node
    return named.attr if isinstance(named, ast.Attribute) and named.attr in MESSAGES else ""


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(_is_constant(each) for each in node.elts)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())


def states_as_text(module: Module) -> list[str]:
    """Return the fields of classes that hold a state as a plain string."""
    return [
        f"{module.file}:{field.lineno}: {kind.name}.{field.target.id}"
        for kind in module.nodes
        if isinstance(kind, ast.ClassDef)
        for field in kind.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if field.target.id in STATES and "str" in _type_names(field.annotation)
    ]


def _compared(node: ast.AST) -> Iterator[ast.expr]:
    """Yield both sides of a comparison, the arguments of a test or search, or the pattern of a `case`."""
    if isinstance(node, ast.Compare):
        yield from (node.left, *node.comparators)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TESTS:
        yield from node.args
    elif isinstance(node, ast.MatchValue):
        yield node.value


def _sentences(node: ast.expr) -> Iterator[str]:
    """Yield the sentences in a literal; nothing for any other expression, and only the keys of a dict."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        yield from [text] if SENTENCE.search(text) else []
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for each in node.elts:
            yield from _sentences(each)
    elif isinstance(node, ast.Dict):
        for key in node.keys:
            yield from _sentences(key) if key is not None else ()
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _sentences(value)
    elif isinstance(node, ast.BinOp):
        yield from _sentences(node.left)
        yield from _sentences(node.right)
    elif isinstance(node, ast.Starred):
        yield from _sentences(node.value)


def _names_of(module: Module) -> set[str]:
    return {node.id for node in module.nodes if isinstance(node, ast.Name)}


def _imported(module: Module) -> Iterator[tuple[str, str]]:
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _looped_over(module: Module, known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables of loops over a constant, with the constant's name; for dict items, the key."""
    for node in module.nodes:
        if isinstance(node, (ast.For, ast.comprehension)):
            target, over = node.target, node.iter
            if isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute):
                over = over.func.value
            first = target.elts[0] if isinstance(target, ast.Tuple) else target
            if isinstance(first, ast.Name) and isinstance(over, (ast.Name, ast.Attribute)):
                yield first.id, _full_name(over, known)


def _full_name(node: ast.expr, known: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return known.get(node.id, "")
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, known)}.{node.attr}"
    return ""


def _type_names(annotation: ast.expr) -> set[str]:
    """Return the type names in `str`, `str | None` and `Optional[str]`, but not in `tuple[str, ...]`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _type_names(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        return _type_names(annotation.left) | _type_names(annotation.right)
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.value, ast.Name):
        return _type_names(annotation.slice) if annotation.value.id == "Optional" else set()
    return {annotation.id} if isinstance(annotation, ast.Name) else set()
