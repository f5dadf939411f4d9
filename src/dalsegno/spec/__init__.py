"""The cluster file: its model, loading with line numbers, resolving into facts.

Names are loaded when first used, so that `from dalsegno.spec.facts import Cluster` costs no pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dalsegno.spec.facts_json import facts_from_json, facts_to_json
    from dalsegno.spec.load import load_spec, parse_spec
    from dalsegno.spec.model import ClusterSpec
    from dalsegno.spec.resolving import resolve
    from dalsegno.spec.schema import json_schema
    from dalsegno.spec.starting import starter

__all__ = [
    "ClusterSpec",
    "facts_from_json",
    "facts_to_json",
    "json_schema",
    "load_spec",
    "parse_spec",
    "resolve",
    "starter",
]

# No module may bear the name of something it holds: importing it would hide that from `__getattr__`.
_HOMES = {
    "ClusterSpec": "model",
    "facts_from_json": "facts_json",
    "facts_to_json": "facts_json",
    "json_schema": "schema",
    "load_spec": "load",
    "parse_spec": "load",
    "resolve": "resolving",
    "starter": "starting",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
