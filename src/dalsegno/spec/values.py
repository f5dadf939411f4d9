"""Types for values in the cluster file.

Names are accepted by Slurm, Unix and the shell, and cannot break a line in a configuration file. Times, sizes and
shares have forms such as `2h`, `1-00:00:00`, `infinite`, `64G` and `25%`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from dalsegno.hostlist import MAX_NODES, expand
from dalsegno.spec.section import fault, show


def matching(pattern: str, hint: str) -> AfterValidator:
    """Return a validator for text that matches `pattern`.

    Repetitions in the pattern must be bounded, because the text is untrusted.
    """
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if compiled.fullmatch(value):
            return value
        raise fault(f"cannot be {show(value)}", hint)

    return AfterValidator(check)


def shaped(pattern: str, example: str) -> AfterValidator:
    """Return a validator for a cloud's id, because the cloud would refuse a malformed id only after minutes."""
    return matching(pattern, f"it looks like `{example}`")


# Keywords of Slurm, and names of our own hosts
_RESERVED = {"default", "all", "localhost"} | {"switch", "head-backup", "rest"}
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_HOSTS_HINT = "write `gpu[1-4]`, or a list of names"


def _not_reserved(value: str) -> str:
    if value.lower() in _RESERVED:
        raise fault(f"cannot be {show(value)}", "the name is reserved; choose another name")
    return value


def _partition_name(value: str) -> str:
    return value if value == "all" else _not_reserved(value)  # Slurm reserves `all` for nodes only


def _host_name(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError(f"`{value[:60]}` is not a node name")
    return _not_reserved(value)


def is_node_name(value: str) -> bool:
    """Return whether the cluster file accepts a node's name."""
    try:
        return bool(_host_name(value))
    except ValueError:
        return False


def _hostnames(value: object) -> list[str]:
    """Expand one host list or several."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
        raise fault(f"must be node names, not {show(value)}", _HOSTS_HINT)
    try:
        names = [_host_name(name) for part in parts for name in expand(part)]
    except ValueError as error:
        raise fault(f"cannot be read: {error}", _HOSTS_HINT) from None
    if not names:
        raise fault(f"must be node names, not {show(value)}", _HOSTS_HINT)
    if len(names) > MAX_NODES:
        raise fault(f"names more than {MAX_NODES:,} nodes", _HOSTS_HINT)
    return names


def _count_or_names(value: object, least: int) -> int | list[str]:
    if isinstance(value, bool) or not isinstance(value, (int, str, list)):
        raise fault(f"must be a number of nodes, or their names, not {show(value)}", "write `4`, or `gpu[1-4]`")
    if not isinstance(value, int):
        return _hostnames(value)
    if not least <= value <= MAX_NODES:
        raise fault(f"must be between {least} and {MAX_NODES:,}, not {show(value)}")
    return value


def _listed(value: Any) -> Any:
    """Split text at commas into a list, as in Slurm. Return other values unchanged."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_CLUSTER_RULE = "use lowercase letters, digits, `-` and `_`, starting with a letter, at most 40"
_SLURM_RULE = "use letters, digits, `-` and `_`, starting with a letter or digit, at most 48"
_LOWER_RULE = "use lowercase letters, digits, `-`, `_` and `.`, starting with a letter or digit, at most 48"
_UNIX_RULE = "use lowercase letters, digits, `-` and `_`, starting with a letter, at most 32"
_PATH_RULE = "write an absolute path of letters, digits and `_./@%+=~-`"

# The name is also the prefix of Slurm's database tables.
ClusterName = Annotated[
    str,
    matching(r"[a-z][a-z0-9_-]{0,39}", _CLUSTER_RULE),
    Field(json_schema_extra={"pattern": "^[a-z][a-z0-9_-]{0,39}$"}),
]
PlainName = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}", _SLURM_RULE)]
PartitionName = Annotated[PlainName, AfterValidator(_partition_name)]
# Slurm's database stores accounts and QOS in lower case, so other spellings would not be found.
AccountName = Annotated[str, matching(r"[a-z0-9][a-z0-9_.-]{0,47}", _LOWER_RULE)]
UserName = Annotated[str, matching(r"[a-z_][a-z0-9_-]{0,31}", _UNIX_RULE)]
Feature = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,47}", "use letters, digits, `-`, `_` and `.`")]
GpuType = Annotated[str, matching(r"[a-z0-9][a-z0-9_.-]{0,31}", "write it as Slurm's gres: `h100`, `a100`, `l4`")]
InstanceName = Annotated[
    str, matching(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", "write it as the cloud does: `p5.48xlarge`, `BM.GPU.H100.8`")
]
Label = Annotated[str, matching(r"[^\x00-\x1f\x7f\"'`\\]{0,200}", "use one line without quotes, at most 200 letters")]
AbsolutePath = Annotated[str, matching(r"/[A-Za-z0-9_./@%+=~-]{0,254}", _PATH_RULE)]

_NAMES: list[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
_LIST_SCHEMA = WithJsonSchema({"anyOf": _NAMES})

HostNames = Annotated[list[str], PlainValidator(_hostnames), _LIST_SCHEMA]
NodeCount = Annotated[
    "int | list[str]",
    PlainValidator(lambda value: _count_or_names(value, 1)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, *_NAMES]}),
]
SpareCount = Annotated[
    "int | list[str]",
    PlainValidator(lambda value: _count_or_names(value, 0)),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, *_NAMES]}),
]
Accounts = Annotated[list[AccountName], BeforeValidator(_listed), _LIST_SCHEMA]
Users = Annotated[list[UserName], BeforeValidator(_listed), _LIST_SCHEMA]
Groups = Users
Features = Annotated[list[Feature], BeforeValidator(_listed), _LIST_SCHEMA]
PartitionNames = Annotated[list[PartitionName], BeforeValidator(_listed), _LIST_SCHEMA]
PlainNames = Annotated[list[PlainName], BeforeValidator(_listed), _LIST_SCHEMA]


# Times, sizes and shares
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_WORDS = {"sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "day": "d", "week": "w"}
_SPAN = re.compile(r"(\d{1,9})\s*([a-z]+)\s*")
_SLURM_DAYS = re.compile(r"(\d{1,6})-(\d{1,2})(?::(\d{1,2}))?(?::(\d{1,2}))?")
_SLURM_CLOCK = re.compile(r"(\d{1,9}):(\d{1,2})(?::(\d{1,2}))?")
_FOREVER = {"infinite", "unlimited", "never"}
_MAX_S = 100 * 365 * 86400

_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,3})?)\s*([kmgtp])(?:i?b)?", re.IGNORECASE)
_SIZE_MIB = {"k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0**2, "p": 1024.0**3}

_TIME_HINT = "write `30m`, `2h`, `1d`, Slurm's `1-00:00:00`, or `infinite`"
_SIZE_HINT = "write a number with its unit: `512M`, `64G`, `2T`"


def parse_time(value: object, bare_s: int) -> int | None:
    """Return seconds; None for infinite. A bare number is in units of `bare_s`. Raise ValueError if it is invalid."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value * bare_s
    if not isinstance(value, str):
        raise ValueError(value)
    text = value.strip().lower()
    if text in _FOREVER:
        return None
    if text.isascii() and text.isdigit() and len(text) < 12:
        return int(text) * bare_s
    return _slurm_time(text) or _span(text)


def _slurm_time(text: str) -> int:
    if found := _SLURM_DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return days * 86400 + hours * 3600 + minutes * 60 + seconds
    if found := _SLURM_CLOCK.fullmatch(text):
        first, second, third = found.groups()
        if third is None:
            return int(first) * 60 + int(second)
        return int(first) * 3600 + int(second) * 60 + int(third)
    return 0


def _span(text: str) -> int:
    if not text or _SPAN.sub("", text):
        raise ValueError(text)
    return sum(int(count) * _unit_s(unit) for count, unit in _SPAN.findall(text))


def _unit_s(unit: str) -> int:
    single = unit.removesuffix("s") if len(unit) > 1 else unit
    letter = _WORDS.get(single, single)
    if letter not in _UNITS_S:
        raise ValueError(unit)
    return _UNITS_S[letter]


def _time(value: object, bare_s: int) -> int | None:
    try:
        seconds = parse_time(value, bare_s)
    except ValueError:
        raise fault(f"must be a time, not {show(value)}", _TIME_HINT) from None
    if seconds is not None and not 0 < seconds <= _MAX_S:
        raise fault(f"must be more than 0 and at most 100 years, not {show(value)}", _TIME_HINT)
    return seconds


def _limit(value: object) -> int | None:
    """Return a limit in whole minutes, rounded up as Slurm does."""
    seconds = _time(value, 60)
    return None if seconds is None else -(-seconds // 60)


def _finite(value: object, bare_s: int) -> int:
    seconds = _time(value, bare_s)
    if seconds is None:
        raise fault("cannot be infinite", "write `30s`, `5m`, `7d`")
    return seconds


def _minutes(value: object) -> int:
    return -(-_finite(value, 60) // 60)


def _seconds(value: object) -> int:
    return _finite(value, 1)


def parse_size_mib(value: object) -> int:
    """Parse a size with a unit, such as 64G, into MiB. Units are powers of 1024. Raise ValueError if it is invalid."""
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if not found:
        raise ValueError(value)
    return int(float(found[1]) * _SIZE_MIB[found[2].lower()])


def _size_mib(value: object) -> int:
    try:
        size = parse_size_mib(value)
    except ValueError:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        what = f"has no unit: {show(value)}" if number else f"must be a size, not {show(value)}"
        raise fault(what, _SIZE_HINT) from None
    if not 1 <= size <= 1024**4:
        raise fault(f"must be between 1M and 1024P, not {show(value)}", _SIZE_HINT)
    return size


def _share(value: object) -> float:
    """Return a share given as `25%` or 0.25."""
    share = -1.0
    if isinstance(value, str) and re.fullmatch(r"\d{1,3}(\.\d{1,6})?\s*%", value):
        share = float(value.rstrip("% ")) / 100
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        share = float(value)
    if not 0 < share <= 1:
        raise fault(f"must be a share of the whole, not {show(value)}", "write `25%` or `0.25`")
    return share


_TIME_SCHEMA = WithJsonSchema(
    {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}], "examples": ["30m", "2h", "1-00:00:00"]}
)
_SIZE_SCHEMA = WithJsonSchema({"type": "string", "examples": ["512M", "64G", "2T"]})

# A limit in whole minutes; None for `infinite`. As in Slurm, a bare number is minutes.
Limit = Annotated["int | None", PlainValidator(_limit), _TIME_SCHEMA]
Minutes = Annotated[int, PlainValidator(_minutes), _TIME_SCHEMA]
# As in Slurm's *Timeout settings, a bare number is seconds.
Seconds = Annotated[int, PlainValidator(_seconds), _TIME_SCHEMA]
SizeMiB = Annotated[int, PlainValidator(_size_mib), _SIZE_SCHEMA]
Share = Annotated[
    float,
    PlainValidator(_share),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "%$"}], "examples": ["25%", 0.25]}),
]
