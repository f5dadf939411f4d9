"""Commented starter files, one per target."""

from __future__ import annotations

from pathlib import Path

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.spec.targets import TARGETS

_FOLDER = Path(__file__).parent / "starters"


def starter(target: str = "local", name: str = "demo") -> str:
    """A cluster file to begin with. It passes `dalsegno validate` as it is."""
    if target not in TARGETS:
        raise UsageError(f"there is no target `{target}`", hint=did_you_mean(target, TARGETS, ", ".join(TARGETS)))
    text = (_FOLDER / f"{target}.yaml").read_text(encoding="utf-8")
    return text.replace("name: demo", f"name: {name}", 1)
