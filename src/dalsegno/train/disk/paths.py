"""Where each named tensor and value stood in the nested state: what torch needs to rebuild it without a model."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping
from typing import Any

from dalsegno.train.disk.part import PathStep


def paths_in(shell: bytes, keys: Collection[str]) -> dict[str, tuple[PathStep, ...]]:
    try:
        nested = pickle.loads(shell)
    except Exception:  # classes that only the training script has: the names alone must do then
        return {}
    found: dict[str, tuple[PathStep, ...]] = {}

    def walk(path: tuple[PathStep, ...], value: Any) -> None:
        key = ".".join(map(str, path))
        if key in keys:
            found[key] = path
        elif isinstance(value, Mapping):
            for name, each in value.items():
                walk((*path, str(name)), each)
        elif isinstance(value, (list, tuple)):
            for place, each in enumerate(value):
                walk((*path, place), each)

    walk((), nested)
    return found
