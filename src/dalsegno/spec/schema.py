"""The JSON schema of the cluster file, and the starter files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dalsegno.errors import UsageError
from dalsegno.hardware import did_you_mean
from dalsegno.spec.model import ClusterSpec
from dalsegno.spec.targets import TARGETS


def json_schema() -> dict[str, Any]:
    """Return the schema, with a description of every key."""
    schema = ClusterSpec.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Dal Segno cluster file",
        "patternProperties": {"^x-": {"description": "For your own YAML anchors."}},
    }


_FOLDER = Path(__file__).parent / "starters"


def starter(target: str = "local", name: str = "demo") -> str:
    """Return the starter cluster file of a target. It passes `dalsegno validate` unchanged."""
    if target not in TARGETS:
        raise UsageError(f"there is no target `{target}`", hint=did_you_mean(target, TARGETS, ", ".join(TARGETS)))
    text = (_FOLDER / f"{target}.yaml").read_text(encoding="utf-8")
    return text.replace("name: demo", f"name: {name}", 1)
