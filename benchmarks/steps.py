"""Read the output of `training.py`: when every rank has completed a step after a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    at: float
    life: str
    number: int
    world: int


def read(path: Path) -> list[Step]:
    """Return the steps in all complete lines."""
    try:
        lines = path.read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [Step(float(at), life, int(number), int(world)) for at, life, number, world in map(str.split, lines)]


def lives(folder: Path) -> set[str]:
    return {step.life for path in folder.glob("*.steps") for step in read(path)}


def first_step_after_restart(folder: Path, before: set[str], world: int | None = None) -> float | None:
    """Return when the last rank completed its first step in a process that is not in `before`; None until then."""
    fresh = {path.name: [step for step in read(path) if step.life not in before] for path in folder.glob("*.steps")}
    sizes = {steps[0].world for steps in fresh.values() if steps}
    size = world or (max(sizes) if sizes else None)
    firsts = [steps[0].at for steps in fresh.values() if steps and steps[0].world == size]
    return max(firsts) if size is not None and len(firsts) >= size else None


def wait_for_restart(folder: Path, before: set[str], since: float, limit_s: float, world: int | None = None) -> float:
    """Wait for the first step of all ranks after a restart. Return the seconds from `since` to it, at most
    `limit_s`."""
    while time.time() < since + limit_s:
        done = first_step_after_restart(folder, before, world)
        if done is not None:
            return done - since
        time.sleep(0.02)
    return limit_s
