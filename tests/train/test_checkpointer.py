"""A loop of one process: what is refused, and who is at work. No step is saved here: savers are processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train import Checkpointer, CheckpointError  # noqa: E402


def made(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder, model=torch.nn.Linear(2, 2), disk_every=None, **options)


def test_a_step_that_is_not_reported_and_one_that_is_reported_twice_are_refused(tmp_path: Path) -> None:
    ckpt = made(tmp_path)
    loop = ckpt.steps(5)
    next(loop)
    with pytest.raises(CheckpointError, match=r"call done\(0\)"):
        next(loop)
    loop = made(tmp_path).steps(5)
    next(loop)


def test_one_checkpointer_is_at_work_in_a_folder_the_newest(tmp_path: Path) -> None:
    first, second, elsewhere = made(tmp_path / "a"), made(tmp_path / "a"), made(tmp_path / "b")
    loops = [each.steps(5) for each in (first, elsewhere, second)]
    assert [next(loop) for loop in loops] == [0, 0, 0]
    second.done(0)
    elsewhere.done(0)
    with pytest.raises(CheckpointError, match="another one at work"):
        first.done(0)
