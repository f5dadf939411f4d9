"""Facts to JSON and back, leniently: what is missing or of another type is not told, what is unknown is passed over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, cast

from dalsegno.health.facts import GpuFacts, GpuProcess, LogLine, Port

_T = TypeVar("_T")
_KEYS = {"model": "name"}  # nvidia-smi's word, which its stand-in on simulated nodes reads


def plain(value: object) -> Any:
    if is_dataclass(value):
        return {_KEYS.get(each.name, each.name): plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return dict(value) if isinstance(value, Mapping) else value


def lenient(kind: type[_T], entry: Mapping[str, Any]) -> _T:
    found = {}
    for each in fields(cast("Any", kind)):
        value = entry.get(_KEYS.get(each.name, each.name))
        try:
            found[each.name] = _READ[str(each.type)](value)
        except (TypeError, ValueError, OverflowError):
            found[each.name] = _nothing(each)
    return kind(**found)


def _nothing(of: Any) -> Any:
    """What stands for a value that is not told; for what must be told, an emptiness of its type."""
    if of.default is not MISSING:
        return of.default
    if of.default_factory is not MISSING:
        return of.default_factory()
    return -1 if of.type == "int" else 0.0 if of.type == "float" else ""


def _checked(kind: type | tuple[type, ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{value!r} is of another type")
        return value

    return read


def _number(value: Any) -> float:
    number: float = _checked((int, float))(value)
    return number


def _several(read: Callable[[Any], _T]) -> Callable[[Any], tuple[_T, ...]]:
    return lambda value: tuple(read(each) for each in _checked(list)(value))


def _entries(kind: type[_T]) -> Callable[[Any], tuple[_T, ...]]:
    return lambda value: tuple(lenient(kind, each) for each in _checked(list)(value) if isinstance(each, dict))


def _counters(value: Any) -> dict[str, int]:
    return {str(key): int(count) for key, count in _checked(dict)(value).items() if type(count) is int}


_READ: dict[str, Callable[[Any], Any]] = {
    "str": _checked(str),
    "bool": _checked(bool),
    "int": _checked(int),
    "float": _number,
    "bool | None": _checked(bool),
    "int | None": _checked(int),
    "float | None": _number,
    "tuple[str, ...] | None": _several(_checked(str)),
    "tuple[float, ...]": _several(_number),
    "tuple[GpuFacts, ...]": _entries(GpuFacts),
    "tuple[GpuProcess, ...] | None": _entries(GpuProcess),
    "tuple[LogLine, ...]": _entries(LogLine),
    "tuple[Port, ...]": _entries(Port),
    "Mapping[str, int]": _counters,
}
