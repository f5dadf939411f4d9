"""Facts to JSON and back, for state folders. Works for any frozen dataclass of plain values; no pydantic.

Reading is lenient: a key that is not known is passed over and one that is missing takes its default, so that state
written by an older or newer version still reads. An enum may say in `_missing_` how it reads other values.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dalsegno.errors import DalsegnoError

_T = TypeVar("_T")
_KNOWN: dict[type[object], dict[str, Any]] = {}


def facts_to_json(facts: object) -> dict[str, Any]:
    """A dataclass as a dict that `json.dumps` takes."""
    return {name: _plain(getattr(facts, name)) for name in _hints(type(facts))}


def _plain(value: object) -> Any:
    if is_dataclass(value):
        return facts_to_json(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def facts_from_json(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """A dataclass of `kind` from what `facts_to_json` gave. DalsegnoError if it is something else."""
    hints = _hints(kind)
    missing = _required(kind) - data.keys()
    if missing:
        raise _broken(kind, f"`{min(missing)}` is missing")
    return kind(**{name: _read(hints[name], value, kind) for name, value in data.items() if name in hints})


def _read(hint: Any, value: Any, kind: type) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        only = next(each for each in inner if each is not type(None))
        return None if value is None else _read(only, value, kind)
    if is_dataclass(hint) and isinstance(value, Mapping):
        return facts_from_json(cast("type[Any]", hint), value)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], each, kind) for each in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _read(inner[1], each, kind) for key, each in value.items()}
    return _scalar(hint, value, kind)


def _scalar(hint: Any, value: Any, kind: type) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise _broken(kind, f"{value!r:.40} is not of type {hint.__name__}") from None
    if hint is float and isinstance(value, int):
        return float(value)
    if hint is Any or (isinstance(hint, type) and type(value) is hint):
        return value
    raise _broken(kind, f"{value!r:.40} is not of type {getattr(hint, '__name__', hint)}")


def _broken(kind: type, why: str) -> DalsegnoError:
    return DalsegnoError(f"a saved {kind.__name__.lower()} cannot be read: {why}", hint="was the file edited by hand?")


def _hints(kind: type[object]) -> dict[str, Any]:
    """Fields and their types; working them out is slow, and a cluster has a thousand nodes."""
    if kind not in _KNOWN:
        found = get_type_hints(kind)
        _KNOWN[kind] = {each.name: found[each.name] for each in fields(cast("Any", kind))}
    return _KNOWN[kind]


def _required(kind: type[object]) -> set[str]:
    everything = fields(cast("Any", kind))
    return {each.name for each in everything if each.default is MISSING and each.default_factory is MISSING}
