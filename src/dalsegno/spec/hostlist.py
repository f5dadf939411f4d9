"""Node names as Slurm writes them, spelled out: `train-[1-3,7]` is train-1, train-2, train-3, train-7."""

from __future__ import annotations

import re

MAX_NODES = 65_536

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_PARTS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def expand(text: str) -> tuple[str, ...]:
    """All names of a hostlist, in its order. ValueError (with the reason) for one that Slurm would not read."""
    names: list[str] = []
    for part in _split(text):
        names += _expand_one(part.strip(), MAX_NODES - len(names))
    return tuple(names)


def _split(text: str) -> list[str]:
    """At the commas that stand outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _expand_one(part: str, room: int) -> list[str]:
    names = [""]
    at = 0
    for found in _PARTS.finditer(part):
        names = _times(names, [part[at : found.start()]], room)
        names = _times(names, _numbers(found[1], room), room)
        at = found.end()
    names = _times(names, [part[at:]], room)
    bad = next((name for name in names if not _NAME.fullmatch(name)), None)
    if bad is not None:
        raise ValueError(f"`{part[:60]}` is not a node name or a list such as `gpu[1-4]`")
    return names


def _times(left: list[str], right: list[str], room: int) -> list[str]:
    if len(left) * len(right) > room:
        raise ValueError(f"it names more than {MAX_NODES:,} nodes")
    return [a + b for a in left for b in right]


def _numbers(ranges: str, room: int) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each.strip())
        if not found:
            raise ValueError(f"`[{ranges[:60]}]` is not a list of numbers such as `[1-4,7]`")
        numbers += _range(found[1], found[2] or found[1], room - len(numbers))
    return numbers


def _range(first: str, last: str, room: int) -> list[str]:
    low, high = int(first), int(last)
    if high < low:
        raise ValueError(f"`{first}-{last}` counts backwards")
    if high - low >= room:
        raise ValueError(f"it names more than {MAX_NODES:,} nodes")
    return [str(number).zfill(len(first)) for number in range(low, high + 1)]
