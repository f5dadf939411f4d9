"""Other uses: notebook cells that are run again, threads, compiled models, learning rates by epoch."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from dalsegno.train import Checkpointer
from tests.waiting import eventually

pytestmark = [
    pytest.mark.cluster,  # savers are processes with torch
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]
DATA = TensorDataset(torch.linspace(0, 1, 40).reshape(20, 2))
PER_EPOCH, EPOCHS = 5, 3


class Step(NamedTuple):
    number: int
    epoch: int
    rate: float
    loss: float


class Interrupted(Exception):
    pass


def cell(folder: Path, stop_after: int | None = None, compiled: bool = False) -> list[Step]:
    """Train like the cell of a notebook."""
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(2, 1)
    model = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    sampler = RandomSampler(DATA)
    loader = DataLoader(DATA, 4, sampler=sampler)
    ckpt = Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler, data=loader, disk_every=1)
    seen = []
    for epoch in ckpt.epochs(EPOCHS):
        for (inputs,) in loader:
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(Step(ckpt.step, epoch, optimizer.param_groups[0]["lr"], loss.item()))
            ckpt.done(loss=loss)
            if ckpt.step == stop_after:
                eventually(lambda: _saved(folder) == stop_after)
                raise Interrupted
        scheduler.step()
    return seen


def _saved(folder: Path) -> int:
    latest = folder / "latest"
    return int(os.readlink(latest).partition("-")[2]) if latest.is_symlink() else -1


@pytest.mark.parametrize(
    "stop_after", [3, *(pytest.param(each, marks=pytest.mark.long) for each in (PER_EPOCH, EPOCHS * PER_EPOCH))]
)
def test_interrupted_cell_resumes_when_it_is_run_again(tmp_path: Path, stop_after: int) -> None:
    whole = cell(tmp_path / "whole")
    with pytest.raises(Interrupted):
        cell(tmp_path / "cut", stop_after)
    assert cell(tmp_path / "cut") == whole[stop_after:]
    assert cell(tmp_path / "whole") == []


@pytest.mark.long
def test_checkpoint_of_a_compiled_model_resumes_without_compilation(tmp_path: Path) -> None:
    whole = cell(tmp_path / "whole")
    with pytest.raises(Interrupted):
        cell(tmp_path / "cut", stop_after=7, compiled=True)
    assert cell(tmp_path / "cut") == whole[7:]


def test_training_in_a_thread_saves_without_signal_handlers(tmp_path: Path) -> None:
    seen: list[Step] = []
    thread = threading.Thread(target=lambda: seen.extend(cell(tmp_path)))
    thread.start()
    thread.join(120)
    assert [step.number for step in seen] == list(range(EPOCHS * PER_EPOCH))
    assert _saved(tmp_path) == EPOCHS * PER_EPOCH


def test_signal_during_the_last_step_ends_normally(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path, model=torch.nn.Linear(2, 1), disk_every=None)
    for step in ckpt.steps(2):
        os.kill(os.getpid(), signal.SIGTERM if step == 1 else 0)
        ckpt.done(step)
    assert _saved(tmp_path) == 2
