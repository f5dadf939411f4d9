"""Validators for text of a given shape."""

from __future__ import annotations

import re

from pydantic import AfterValidator

from dalsegno.spec.section import fault, show


def matching(pattern: str, hint: str) -> AfterValidator:
    """The whole text must match `pattern`; keep its repeats bounded, it meets text from strangers."""
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if compiled.fullmatch(value):
            return value
        raise fault(f"cannot be {show(value)}", hint)

    return AfterValidator(check)


def shaped(pattern: str, example: str) -> AfterValidator:
    """An id of a cloud, which would refuse a malformed one only after minutes."""
    return matching(pattern, f"it looks like `{example}`")
