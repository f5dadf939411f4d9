"""What a script asks of Checkpointer, looked through before anything is touched: an option that is only used under a
launcher, or at the end, should not fail there for the first time.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union

from dalsegno.train.errors import CheckpointError
from dalsegno.train.interval import parse_interval

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
