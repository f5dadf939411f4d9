"""How often: what a user writes, what is due, and what would be best. Pure.

Ranks differ by milliseconds: where it is a time or "auto", one rank decides and tells the others.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Union

STALL_SHARE = 0.01  # of all time, for "auto"
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])", re.ASCII)
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Never:
    pass


@dataclass(frozen=True)
class Steps:
    every: int


@dataclass(frozen=True)
class Seconds:
    every: float


@dataclass(frozen=True)
class Auto:
    """As often as costs at most 1 % of the time."""


Interval = Union[Never, Steps, Seconds, Auto]


@dataclass(frozen=True)
class Measured:
    """What is known of the cost so far; None where nothing was measured yet."""

    step_s: float | None = None
    stall_s: float | None = None


UNKNOWN = Measured()


def parse_interval(text: object, name: str = "every", auto: bool = True) -> Interval:
    """`10` steps, `"10m"`, `"auto"`, None or 0 for never. ValueError says what is wrong, and what would be right."""
    if text is None or text is False or text == 0:
        return Never()
    if isinstance(text, int) and text is not True and text > 0:
        return Steps(text)
    if text == "auto" and auto:
        return Auto()
    found = _TIME.fullmatch(text.strip()) if isinstance(text, str) else None
    if found and float(found[1]) > 0:
        return Seconds(float(found[1]) * _SECONDS[found[2]])
    raise ValueError(f"{name}={text!r} is no interval: write {_choices(auto)}")


def auto_steps(measured: Measured) -> int:
    """Steps between two snapshots so that they stall training for at most 1 % of its time; often at first, to learn."""
    if not measured.step_s or measured.stall_s is None:
        return 1
    return max(1, math.ceil(measured.stall_s / (STALL_SHARE * measured.step_s)))


def suggest_interval_s(stall_s: float, failures: int, over_s: float, save_s: float = 0.0) -> float | None:
    """The interval that loses least time to saving and to failures together, after Young and Daly.

    None without a failure or a cost to reckon with. `stall_s`: what a save costs the training. `save_s`: what it takes
    beside the training; the next one cannot begin before that.
    """
    if failures <= 0 or over_s <= 0 or stall_s <= 0:
        return None
    return max(save_s, _daly(stall_s, over_s / failures))


def _daly(stall_s: float, between_s: float) -> float:
    if stall_s >= 2 * between_s:
        return between_s
    part = stall_s / (2 * between_s)
    return math.sqrt(2 * stall_s * between_s) * (1 + math.sqrt(part) / 3 + part / 9) - stall_s


def _choices(auto: bool) -> str:
    words = 'a number of steps (100), a time ("30s", "10m", "1h")' + (', "auto"' if auto else "")
    return f"{words}, or None for never"
