"""Check a request against AWS's full service model before it is sent.

botocore checks required and unknown fields, types and minimums, but not enums, patterns and maximums. AWS would refuse
an invalid value of these kinds, sometimes after minutes. `find_problems` checks everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from dalsegno.errors import TargetError, install_hint
from dalsegno.hardware import did_you_mean

_SHOWN = 60
# Python's patterns lack Java's classes of letters, digits and separators, so the classes on the right replace them.
_CLASSES = {r"\p{L}": r"\w", r"\p{N}": r"\d", r"\p{Z}": r"\s", r"\p{M}": ""}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "character": (str,),
    "integer": (int,),
    "long": (int,),
    "float": (int, float),
    "double": (int, float),
    "boolean": (bool,),
    "timestamp": (datetime, str, int, float),
    "blob": (bytes, bytearray, str),
    "list": (list, tuple),
    "map": (Mapping,),
    "structure": (Mapping,),
}


def check_request(service: str, operation: str, request: Mapping[str, Any]) -> None:
    """Raise TargetError with all problems if the service would refuse the request."""
    _service_model(service)  # called first, because its error says that the SDK is missing
    problems = list(find_problems(input_shape(service, operation), request))
    if problems:
        raise TargetError(
            f"{service} would refuse the request {operation}: {'; '.join(problems)}",
            hint="correct the value in the cluster file, then run the command again",
        )


@lru_cache(maxsize=64)
def input_shape(service: str, operation: str) -> Any:
    """Return botocore's model of an operation's input."""
    from botocore.model import OperationNotFoundError

    try:
        return _service_model(service).operation_model(operation).input_shape
    except OperationNotFoundError:
        raise _too_old(f"{operation} of {service}") from None


@lru_cache(maxsize=8)
def _service_model(service: str) -> Any:
    """Return botocore's model of a service. Reading it takes a third of a second, so it is read once."""
    try:
        from botocore.exceptions import UnknownServiceError
        from botocore.session import get_session
    except ImportError:
        raise TargetError("this needs the AWS SDK, boto3", hint=install_hint("aws")) from None
    try:
        return get_session().get_service_model(service)
    except UnknownServiceError:
        raise _too_old(service) from None


def _too_old(what: str) -> TargetError:
    return TargetError(
        f"the installed AWS SDK does not know {what}", hint='it is too old: `pip install --upgrade "dalsegno[aws]"`'
    )


def find_problems(shape: Any, value: object, path: str = "") -> Iterator[str]:
    """Yield a phrase for each part of `value` that does not fit the shape."""
    name = path or "the request"
    if not _has_type(shape, value):
        yield f"{name} is {_show(value)}, not a {shape.type_name}"
        return
    yield from _outside_limits(shape, value, name)
    if shape.type_name == "structure" and isinstance(value, Mapping):
        yield from _in_structure(shape, value, path)
    elif shape.type_name == "list" and isinstance(value, (list, tuple)):
        for at, each in enumerate(value):
            yield from find_problems(shape.member, each, f"{path}[{at}]")
    elif shape.type_name == "map" and isinstance(value, Mapping):
        for key, each in value.items():
            yield from find_problems(shape.key, key, f"{path}.{key}")
            yield from find_problems(shape.value, each, f"{path}.{key}")


def _has_type(shape: Any, value: object) -> bool:
    if isinstance(value, bool) and shape.type_name != "boolean":
        return False
    return isinstance(value, _TYPES.get(shape.type_name, (object,)))


def _in_structure(shape: Any, value: Mapping[str, Any], path: str) -> Iterator[str]:
    start = f"{path}." if path else ""
    for key in shape.metadata.get("required", ()):
        if key not in value:
            yield f"{start}{key} is missing"
    for key, each in value.items():
        if key in shape.members:
            yield from find_problems(shape.members[key], each, start + key)
        else:
            hint = did_you_mean(key, shape.members)
            yield f"{start}{key} is unknown" + (f" ({hint})" if hint else "")


def _outside_limits(shape: Any, value: Any, name: str) -> Iterator[str]:
    limits = shape.metadata
    allowed = limits.get("enum")
    if allowed and value not in allowed:
        hint = did_you_mean(str(value), allowed, f"one of {', '.join(allowed[:8])}{' …' if len(allowed) > 8 else ''}")
        yield f"{name} cannot be {_show(value)}: {hint}"
    size, noun = _size(value)
    if size is not None and "min" in limits and size < limits["min"]:
        yield f"{name} is {_show(value)}: at least {limits['min']}{noun}"
    if size is not None and "max" in limits and size > limits["max"]:
        yield f"{name} is {_show(value)}: at most {limits['max']}{noun}"
    pattern = limits.get("pattern")
    if pattern and isinstance(value, str) and not allowed and not _matches(pattern, value):
        yield f"{name} is {_show(value)}, which does not match {pattern}"


def _size(value: object) -> tuple[float | None, str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value, ""
    if isinstance(value, str):
        return len(value), " characters"
    if isinstance(value, (list, tuple, Mapping)):
        return len(value), " entries"
    return None, ""


def _matches(pattern: str, value: str) -> bool:
    compiled = _compiled(pattern)
    return compiled is None or compiled.fullmatch(value) is not None


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Return a compiled pattern; None if Python does not support its syntax. In that case, only the service checks the
    value."""
    for java, python in _CLASSES.items():
        pattern = pattern.replace(java, python)
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _show(value: object) -> str:
    if isinstance(value, (list, tuple, Mapping)):
        return f"{len(value)} entries"
    text = repr(value) if not isinstance(value, str) else f"`{value}`"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
