"""The JSON schema of the cluster file, for editors."""

from __future__ import annotations

from typing import Any

from dalsegno.spec.model import ClusterSpec


def json_schema() -> dict[str, Any]:
    """The schema, with a description of every key."""
    schema = ClusterSpec.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Dal Segno cluster file",
        "patternProperties": {"^x-": {"description": "Your own; a place for anchors."}},
    }
