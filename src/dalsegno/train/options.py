"""What a script asks of Checkpointer, looked through before anything is touched: an option that is only used under a
launcher, or at the end, should not fail there for the first time.
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

from dalsegno.train.errors import CheckpointError

# ---- How often: what a user writes, what is due, and what would be best. Pure.


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


# ---- What a script asks of Checkpointer, looked through before anything is touched: an option that is only used
# under a launcher, or at the end, should not fail there for the first time.


OPTIONS = ("data", "per_rank", "memory_every", "disk_every", "keep", "keep_every", "grace_s", "signals")
Folder = Union[str, "os.PathLike[str]"]
_NOT_TO_BE_HEARD = (signal.SIGKILL, signal.SIGSTOP)


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
    """An empty name would be the folder of the script: a variable that nobody has set."""
    if not os.fspath(folder):
        raise CheckpointError("the folder for checkpoints has no name", hint='Checkpointer("/ckpt/gpt", …)')
    return Path(folder).absolute()


def check_objects(objects: Mapping[str, Any], data: Any) -> None:
    """What has no state may be an option that was misspelt."""
    if data is None and all(each is None for each in objects.values()):
        raise CheckpointError("nothing to save", hint="Checkpointer(folder, model=model, optimizer=optimizer)")
    for name, each in objects.items():
        close = get_close_matches(name, OPTIONS, n=1, cutoff=0.7)
        if close and not hasattr(each, "state_dict"):
            raise CheckpointError(f"there is no option `{name}`", hint=f"did you mean `{close[0]}`?")


def check_per_rank(per_rank: object, objects: Mapping[str, Any]) -> None:
    """Objects by name, as the others, but each rank has its own."""
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
        raise CheckpointError(f"{name}={value!r} is no number of checkpoints or steps", hint="1 or more")


def _check_grace(value: object) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise CheckpointError(f"grace_s={value!r} is no number of seconds", hint="grace_s=25.0, say")


def _check_signals(numbers: object) -> None:
    known = [number for number in signal.valid_signals() if number not in _NOT_TO_BE_HEARD]
    if not isinstance(numbers, Iterable) or any(number not in known for number in numbers):
        raise CheckpointError(
            f"signals={numbers!r} are no signals that can be heard", hint="signals=(signal.SIGUSR1,), say"
        )
