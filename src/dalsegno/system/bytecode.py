"""A module's compiled file, made by another process: compiling a large one leaves memory behind that stays taken."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys

from dalsegno.system.apart import NoAnswer, ask

TIMEOUT_S = 4.0


def compile_apart(module: str) -> None:
    """Before it is imported. Nothing is done where that has no use, or no right to."""
    if module in sys.modules:
        return
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or spec.cached is None or os.path.exists(spec.cached):
        return
    if os.access(os.path.dirname(spec.origin), os.W_OK):
        with contextlib.suppress(NoAnswer):
            ask([sys.executable, "-I", "-m", "py_compile", spec.origin], timeout_s=TIMEOUT_S)
