"""Split nested state dicts into named tensors and a shell, and rebuild them.

The names are those of PyTorch's distributed checkpoint (`model.layers.0.weight`), so that its loader finds them. The
shell records what the names cannot express: the types of keys, empty dicts and tuples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class TensorPlaceholder(NamedTuple):
    """A placeholder for a tensor in a shell."""

    key: str


# Checkpoints hold this class as `dalsegno.train.nested.Hole`, so that older versions can read them.
Hole = TensorPlaceholder
TensorPlaceholder.__qualname__ = "Hole"


def empty_out(nested: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor], dict[str, object]]:
    """Replace the tensors in nested dicts by placeholders.

    Return the resulting shell and, by name, the tensors and the other leaves.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, object] = {}

    def note(into: dict[str, Any], key: str, value: Any) -> None:
        if key in tensors or key in values:
            raise ValueError(f"two entries of the state have the name {key!r}")
        into[key] = value

    def walk(path: tuple[str, ...], value: Any) -> Any:
        key = ".".join(path)
        if isinstance(value, torch.Tensor):
            note(tensors, key, value)
            return TensorPlaceholder(key)
        if isinstance(value, Mapping):
            return _like(value, {name: walk((*path, str(name)), each) for name, each in value.items()})
        if _holds_tensors(value):
            return type(value)(walk((*path, str(place)), each) for place, each in enumerate(value))
        note(values, key, value)
        return value

    return walk((), nested), tensors, values


def fill_in(shell: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the nested dicts with each tensor in its place."""
    if isinstance(shell, TensorPlaceholder):
        return tensors[shell.key]
    if isinstance(shell, Mapping):
        return _like(shell, {name: fill_in(each, tensors) for name, each in shell.items()})
    if isinstance(shell, (list, tuple)) and type(shell) in (list, tuple):
        return type(shell)(fill_in(each, tensors) for each in shell)
    return shell


def _like(old: Mapping[Any, Any], new: dict[Any, Any]) -> Any:
    """Return `new` converted to the type of `old`, for example OrderedDict. A read-only view becomes a dict."""
    if type(old) is dict or not hasattr(old, "copy") or not hasattr(old, "update"):
        return new
    same = old.copy()
    same.clear()
    same.update(new)
    return same


def _holds_tensors(value: Any) -> bool:
    """Return whether to descend into a list or a tuple.

    As in torch, this is true for a list that contains tensors or mappings, and for a tuple that contains tensors, also
    in nested lists or tuples.
    """
    if type(value) is list:
        return any(isinstance(each, (torch.Tensor, Mapping)) or _holds_tensors(each) for each in value)
    return type(value) is tuple and any(isinstance(each, torch.Tensor) or _holds_tensors(each) for each in value)
