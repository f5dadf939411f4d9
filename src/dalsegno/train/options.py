"""Check the options of Checkpointer when it is created.

Some options are used only under a launcher or at the end of training, where an invalid value would be noticed late.
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union

from dalsegno.train import contract
from dalsegno.train.errors import CheckpointError

# Intervals between snapshots, and between saves

STALL_SHARE = 0.01  # with "auto", snapshots may stall training for this fraction of the time
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
    """The shortest interval at which snapshots stall training for at most 1 % of the time."""


Interval = Union[Never, Steps, Seconds, Auto]


@dataclass(frozen=True)
class Measured:
    """The durations of a step and of the stall for a snapshot. None means that a value has not been measured yet."""

    step_s: float | None = None
    stall_s: float | None = None


UNKNOWN = Measured()


def parse_interval(text: object, name: str = "every", auto: bool = True) -> Interval:
    """Parse `10` (steps), `"10m"`, `"auto"`, or None or 0 for never. Raise ValueError with the valid forms."""
    if text is None or text is False or text == 0:
        return Never()
    if isinstance(text, int) and text is not True and text > 0:
        return Steps(text)
    if text == "auto" and auto:
        return Auto()
    found = _TIME.fullmatch(text.strip()) if isinstance(text, str) else None
    if found and float(found[1]) > 0:
        return Seconds(float(found[1]) * _SECONDS[found[2]])
    raise ValueError(f"invalid interval {name}={text!r}: use {_choices(auto)}")


def auto_steps(measured: Measured) -> int:
    """Return how many steps apart snapshots must be to stall training for at most 1 % of the time.

    Return 1 until the cost is known.
    """
    if not measured.step_s or measured.stall_s is None:
        return 1
    return max(1, math.ceil(measured.stall_s / (STALL_SHARE * measured.step_s)))


def suggest_interval_s(stall_s: float, failures: int, over_s: float, save_s: float = 0.0) -> float | None:
    """Return the interval that minimizes the time lost to saves and failures, by the formula of Young and Daly.

    `failures` is the number of failures in `over_s` seconds. `stall_s` is how long a save stalls training. `save_s` is
    how long a save runs while training continues; the interval is never shorter. Return None if there was no failure or
    no stall.
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
    choices = 'a number of steps (100), a time ("30s", "10m", "1h")' + (', "auto"' if auto else "")
    return f"{choices}, or None for never"


# Checks of options

OPTIONS = ("data", "per_rank", "memory_every", "disk_every", "keep", "keep_every", "grace_s", "signals")
Folder = Union[str, "os.PathLike[str]"]
_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)


def check_options(
    memory_every: object, disk_every: object, keep: object, keep_every: object, grace_s: object, signals: object
) -> None:
    parse_interval(memory_every, "memory_every")
    parse_interval(disk_every, "disk_every", auto=False)
    _check_number("keep", keep)
    if keep_every is not None:
        _check_number("keep_every", keep_every)
    _check_grace(grace_s)
    _check_signals(signals)


def check_folder(folder: Folder) -> Path:
    """Return the absolute path. Refuse an empty path, which usually comes from an unset variable."""
    if not os.fspath(folder):
        raise CheckpointError("the checkpoint folder is an empty string", hint='Checkpointer("/ckpt/gpt", …)')
    return Path(folder).absolute()


def check_objects(objects: Mapping[str, Any], data: Any) -> None:
    """Raise if there is nothing to save.

    Also raise if an object has no `state_dict` and a name that looks like a misspelled option.
    """
    if data is None and all(each is None for each in objects.values()):
        raise CheckpointError("nothing to save", hint="Checkpointer(folder, model=model, optimizer=optimizer)")
    for name, each in objects.items():
        close = get_close_matches(name, OPTIONS, n=1, cutoff=0.7)
        if close and not hasattr(each, "state_dict"):
            raise CheckpointError(f"there is no option `{name}`", hint=f"did you mean `{close[0]}`?")


def check_per_rank(per_rank: object, objects: Mapping[str, Any]) -> None:
    """Check the objects passed as `per_rank`."""
    if per_rank is None:
        return
    if not isinstance(per_rank, Mapping):
        raise CheckpointError(f"per_rank= is a {type(per_rank).__name__}", hint='per_rank={"cache": cache}')
    for name, each in per_rank.items():
        if name in objects:
            raise CheckpointError(f"`{name}` is given twice, once in per_rank=", hint="give it once")
        if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
            what = f"`{name}` in per_rank= ({type(each).__name__}) has no state_dict and load_state_dict"
            raise CheckpointError(what, hint="give it both, or leave it out")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{name}={value!r} is not a number of checkpoints or steps", hint="1 or more")


def _check_grace(value: object) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise CheckpointError(f"grace_s={value!r} is not a number of seconds", hint="for example grace_s=25.0")


def _check_signals(numbers: object) -> None:
    known = [number for number in signal.valid_signals() if number not in _UNCATCHABLE]
    if not isinstance(numbers, Iterable) or any(number not in known for number in numbers):
        raise CheckpointError(
            f"signals={numbers!r} are not signals that can be caught", hint="for example signals=(signal.SIGUSR1,)"
        )


# Environment variables set by the launcher


def parse_verify_every(environ: Mapping[str, str]) -> int:
    """Return the number of steps between two checks for silent data corruption; 0 means no checks."""
    value = environ.get(contract.VERIFY_EVERY) or "0"
    if not value.isdigit():
        raise CheckpointError(f"{contract.VERIFY_EVERY}={value!r} is not a number of steps", hint="for example 1000")
    return int(value)


def parse_verified(environ: Mapping[str, str]) -> int | None:
    """Return the last step of earlier generations that passed a check for silent data corruption; None if none did."""
    value = environ.get(contract.VERIFIED, "")
    return int(value) if value.isdigit() else None


def parse_trusted(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return a generation and a step; None if all saved states are trusted.

    States that the run saved after this step, up to this generation, may be corrupt.
    """
    generation, _, step = environ.get(contract.TRUSTED, "").partition(":")
    return (int(generation), int(step)) if generation.isdigit() and step.isdigit() else None
