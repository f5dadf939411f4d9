"""Every error has a hint. The rule reads source text, and is also tested on a bad example."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from dalsegno import errors

SRC = Path(__file__).parent.parent / "src" / "dalsegno"
# SpecError has Problems, which have hints.
ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type)} - {
    "SpecError"
}  # its Problems have hints
ERRORS |= {"RunLost"}
MAKES_ONE = re.compile(rf"\b(?:{'|'.join(ERRORS)})\s*\(")


def files() -> Iterable[Path]:
    """Return all files except those of the training library, which has its own errors."""
    return [path for path in sorted(SRC.rglob("*.py")) if SRC / "train" not in path.parents]


def without_hint(text: str) -> list[int]:
    """Return the lines on which an error is created without a hint; `**` counts as a hint."""
    if not MAKES_ONE.search(text):  # skips parsing most files
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ERRORS
        and not {"hint", None} & {word.arg for word in node.keywords}
        and len(node.args) < 3  # the third argument of Problem
    ]


def test_every_error_has_a_hint() -> None:
    found = {str(path.relative_to(SRC)): without_hint(path.read_text()) for path in files()}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_an_error_without_a_hint_is_found() -> None:
    assert without_hint('raise UsageError("no")') == [1]
    assert without_hint('raise UsageError("no", hint="yes")\nProblem("no", "here", "yes")') == []
