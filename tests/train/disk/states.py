"""States and checkpoints for tests. This process writes the shares of all ranks, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.disk.commit import commit
from dalsegno.train.disk.write import write_share
from dalsegno.train.state import TrainingState, take


def yes() -> bool:
    return True


def filled(step: int, rows: int = 64) -> dict[str, Any]:
    """Return a state in which every number is the step, so that a mix of two steps is detected."""
    return {"model": {"weight": torch.full((rows, 5), float(step)), "steps": torch.tensor(step)}, "epoch": step}


def save(folder: Path, nested: dict[str, Any], step: int, world: int = 1, generation: int = 1, **how: Any) -> Path:
    """Write a checkpoint of `world` ranks with the same state."""
    run = how.pop("run", "run-a")
    for rank in range(world):
        write_share(folder, take(nested, {"rank": rank}, step, rank, world), run, generation)
    return commit(folder, step, world, run, generation, how.pop("grant", yes), **how)


def share_of(nested: dict[str, Any], step: int = 1, rank: int = 0, world: int = 1) -> TrainingState:
    return take(nested, {"rank": rank}, step, rank, world)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
