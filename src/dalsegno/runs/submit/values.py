"""Parse the values of a run's options for the command line, job files and environment variables.

Each error is a complete sentence, so that it reads well after a flag's name and after a file's line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from dalsegno.errors import UsageError
from dalsegno.hostlist import MAX_NODES, HostlistError, expand

UNLIMITED_S = 0  # no time limit, as in Slurm's `--time=0`
MAX_COUNT = 65_536

_NODES = re.compile(r"([0-9]{1,6})(?::([0-9]{1,6}))?")
_GPUS = re.compile(r"(?:([A-Za-z0-9][A-Za-z0-9_.-]*):)?([0-9]{1,4})")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_TIME_HINT = "write `90` (minutes), `2:00:00`, `1-12:00:00`, `2h`, or `unlimited`"
_SECONDS_HINT = "write seconds, or `90s`, `5m`, `1h`"


@dataclass(frozen=True)
class NodeCount:
    """The number of nodes of a run, which starts with `max` nodes and may continue with as few as `min`."""

    min: int
    max: int

    def __str__(self) -> str:
        return str(self.max) if self.min == self.max else f"{self.min}:{self.max}"


@dataclass(frozen=True)
class Gpus:
    """The number of GPUs on each node, and their type; "" for any type."""

    count: int = 0
    type: str = ""

    def __str__(self) -> str:
        return f"{self.type}:{self.count}" if self.type else str(self.count)


ONE_NODE = NodeCount(1, 1)
NO_GPUS = Gpus()


def shown(text: str) -> str:
    """Return a user's text for use in a message: short, on one line, in backticks."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text)
    return f"`{line[:60]}…`" if len(line) > 60 else f"`{line}`"


def parse_nodes(text: str) -> NodeCount:
    """Parse `4`, or `1:4` for at least 1 and at most 4."""
    found = _NODES.fullmatch(text.strip())
    nodes = NodeCount(int(found[1]), int(found[2] or found[1])) if found else NodeCount(0, 0)
    if not 1 <= nodes.min <= nodes.max <= MAX_NODES:
        raise UsageError(f"{shown(text)} is not a number of nodes", hint="write `4`, or `1:4`: at most 4, at least 1")
    return nodes


def parse_count(text: str, minimum: int = 0) -> int:
    """Parse a whole number."""
    bare = text.strip()
    if not (bare.isascii() and bare.isdigit() and len(bare) < 8 and minimum <= int(bare) <= MAX_COUNT):
        what = f"{shown(text)} is not a whole number from {minimum} to {MAX_COUNT}"
        raise UsageError(what, hint="use digits only, such as `8`")
    return int(bare)


def parse_positive(text: str) -> int:
    return parse_count(text, minimum=1)


def parse_gpus(text: str) -> Gpus:
    """Parse `8`, or `h100:8` with Slurm's name for the GPU type."""
    found = _GPUS.fullmatch(text.strip())
    if not found:
        raise UsageError(f"{shown(text)} is not a number of GPUs", hint="write `8`, or `h100:8`")
    return Gpus(int(found[2]), found[1] or "")


def parse_time_limit(text: str) -> int:
    """Return a time limit in seconds, or UNLIMITED_S. The format is Slurm's (a bare number is minutes) or `2h`."""
    seconds = _seconds(text, 60, _TIME_HINT)
    return UNLIMITED_S if seconds is None else seconds


def parse_seconds(text: str) -> int:
    """Return a duration in seconds. A bare number is seconds, and `off` is 0."""
    if text.strip().lower() == "off":
        return 0
    seconds = _seconds(text, 1, _SECONDS_HINT)
    if seconds is None:
        raise UsageError(f"{shown(text)} is not a duration", hint=_SECONDS_HINT)
    return seconds


def parse_node_timeout(text: str) -> float:
    """Parse seconds with up to three decimals: `1.5`, `1.5s`."""
    bare = text.strip().lower().removesuffix("s").strip()
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", bare, re.ASCII):
        raise UsageError(f"{shown(text)} is not a number of seconds", hint="write `3` or `1.5s`")
    return float(bare)


def _seconds(text: str, bare_s: int, hint: str) -> int | None:
    from dalsegno.spec.values import parse_time  # imported late, because this imports pydantic, which is slow

    try:
        return parse_time(text, bare_s)
    except ValueError:
        raise UsageError(f"{shown(text)} is not a time", hint=hint) from None


def parse_memory(text: str) -> int:
    """Return a size such as `64G` in MiB. As in Slurm, a bare number is MiB, and 0 is all memory of the node."""
    from dalsegno.spec.values import parse_size_mib

    bare = text.strip()
    try:
        return int(bare) if bare.isascii() and bare.isdigit() and len(bare) < 12 else parse_size_mib(bare)
    except ValueError:
        raise UsageError(f"{shown(text)} is not a size", hint="write `64G`, `512M`, `1T`, or `0` for all") from None


def parse_hosts(text: str) -> tuple[str, ...]:
    """Parse node names: `gpu[1-4],gpu9`."""
    try:
        return tuple(dict.fromkeys(expand(text)))
    except HostlistError as fault:
        raise UsageError(fault.what, hint=fault.hint or "write `gpu3`, or `gpu[1-4]`") from None


def parse_env_pairs(pairs: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Parse words of the form `K=V`. If a name is repeated, its last value counts."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(key):
            raise UsageError(f"{shown(pair)} is not of the form NAME=value", hint="write `NAME=value`")
        found.pop(key, None)
        found[key] = value
    return tuple(found.items())


def parse_env_words(text: str) -> tuple[tuple[str, str], ...]:
    """Parse several `K=V` in one string, separated and quoted as in a shell."""
    return parse_env_pairs(parse_words(text))


def parse_words(text: str) -> tuple[str, ...]:
    """Split a string into words as a shell does."""
    try:
        return tuple(shlex.split(text))
    except ValueError as fault:
        raise UsageError(f"{shown(text)} cannot be split into words: {fault}", hint="close the quotes") from None


def parse_modules(text: str) -> tuple[str, ...]:
    """Parse the names of Python modules, separated by commas."""
    return tuple(parse_module(name.strip()) for name in text.split(",") if name.strip())


def parse_module(name: str) -> str:
    if not _MODULE.fullmatch(name):
        raise UsageError(f"{shown(name)} is not the name of a Python module", hint="write `transformers.models`")
    return name


def parse_standby(text: str) -> str:
    if text.strip().lower() == "auto":
        return "auto"
    return "1" if parse_flag(text) else "0"


def parse_flag(text: str) -> bool:
    """Parse a switch in a variable: 1 or 0, yes or no, true or false, on or off."""
    if text.strip().lower() not in _BOOLEANS:
        raise UsageError(f"{shown(text)} is neither yes nor no", hint="write `1` or `0`")
    return _BOOLEANS[text.strip().lower()]
