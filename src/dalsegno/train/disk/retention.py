"""Which checkpoints go, and how they go: first out of sight in one stroke, then file by file.

Only whole checkpoints and folders with our own hidden names are ever touched; all else is somebody's.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from dalsegno.train.disk.files import remove_tree, told
from dalsegno.train.disk.names import LATEST, Temporary, is_trash, parse_step, parse_temporary, trash_name
from dalsegno.train.disk.reading import removing
from dalsegno.train.disk.verify import faults_of, list_steps


class Keep(NamedTuple):
    last: int
    every: int | None = None  # steps that are multiples of this stay for ever


def to_remove(steps: Collection[int], newest: int, keep: Keep) -> list[int]:
    """Of the checkpoints up to the one just written. Later ones are of another history: not ours to judge."""
    ours = sorted(step for step in steps if step <= newest)
    old = ours[: -max(1, keep.last)]
    return [step for step in old if not (keep.every and step % keep.every == 0)]


def left_behind(names: Collection[str], ours: Temporary) -> list[str]:
    """Folders of savers that were killed, and removals that were cut short.

    Whoever writes here holds the lock, so what other runs left is dead; of our own run it is what is older.
    """
    found = {name: temporary for name in names if (temporary := parse_temporary(name))}
    dead = [name for name, each in found.items() if each.run != ours.run or _age(each) < _age(ours)]
    return sorted([*dead, *(name for name in names if is_trash(name))])


def namesakes(names: Collection[str], run: str, generation: int) -> list[str]:
    """What an earlier life of the run left under the names of this one: torchrun counts from 0 each time."""
    found = {name: temporary for name in names if (temporary := parse_temporary(name))}
    return sorted(name for name, each in found.items() if each.run == run and each.generation >= generation)


def remove_namesakes(folder: Path, run: str, generation: int) -> None:
    """Before the first save, by who holds the lock: or shares of two lives could be put together as one checkpoint."""
    with told("cannot clear", folder):
        for name in namesakes(os.listdir(folder), run, generation):
            remove_tree(folder / name)


def tidy(folder: Path, ours: Temporary, keep: Keep, warn: Callable[[str], None]) -> None:
    """After a commit. What cannot be removed now is tried again after the next one."""
    try:
        for name in left_behind(os.listdir(folder), ours):
            remove_tree(folder / name)
        _retain(folder, ours.step, keep)
    except OSError as error:
        warn(f"cannot remove old checkpoints in {folder}: {error.strerror}")


def _retain(folder: Path, newest: int, keep: Keep) -> None:
    whole = [path for path in list_steps(folder) if not faults_of(path, every_byte=False)]
    steps = {step: path for path in whole if (step := parse_step(path.name)) is not None}
    for step in to_remove(steps, newest, keep):
        if steps[step].name != _latest(folder):
            _remove(steps[step], step)


def _remove(checkpoint: Path, step: int) -> None:
    with removing(checkpoint) as alone:
        if alone:
            trash = checkpoint.with_name(trash_name(step, uuid.uuid4().hex[:8]))
            os.rename(checkpoint, trash)
            remove_tree(trash)


def _latest(folder: Path) -> str:
    try:
        return os.readlink(folder / LATEST)
    except OSError:
        return ""


def _age(temporary: Temporary) -> tuple[int, int]:
    return temporary.generation, temporary.step
