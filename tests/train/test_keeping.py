"""A snapshot holds the step it was taken at, whatever the training does while it is copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.keeping import Keeping  # noqa: E402
from dalsegno.train.memory.names import FOLDER, slots_of, sweep  # noqa: E402
from dalsegno.train.memory.snapshot import open_snapshot, state_of  # noqa: E402
from dalsegno.train.objects import Objects  # noqa: E402
from dalsegno.train.request import Terms  # noqa: E402
from dalsegno.train.state import State, take  # noqa: E402

RUN = f"test-keeping.{os.getpid()}"


@pytest.fixture
def keeping(tmp_path: Path) -> Iterator[Keeping]:
    terms = Terms(str(tmp_path), RUN, 1, 0, 1, keep=3)
    kept = Keeping(terms, None, None, ranks_here=1, warn=print)
    yield kept
    kept.close()
    sweep(RUN)


class Training:
    """Large enough that its copy takes a while, with statistics that change in the forward pass."""

    def __init__(self, optimizer: bool = True) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(1500, 1500), torch.nn.BatchNorm1d(1500))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.objects = Objects({"model": self.model, "optimizer": self.opt} if optimizer else {"model": self.model})

    def step(self) -> None:
        self.opt.zero_grad()
        self.model(torch.randn(8, 1500)).sum().backward()
        self.opt.step()

    def state(self, step: int) -> State:
        return take(self.objects.nested(), own=None, step=step, rank=0, world=1)

    def values(self) -> dict[str, Any]:
        return {piece.key: piece.tensor.clone() for piece in self.state(0).pieces}


def held(step: int) -> dict[str, Any]:
    snapshots = [open_snapshot(FOLDER / str(name)) for name in slots_of(RUN)]
    (found,) = [each for each in snapshots if each is not None and each.record.step == step]
    return {piece.key: piece.tensor.clone() for piece in state_of(found).pieces}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in one if not torch.equal(one[key], other[key])]


def test_what_the_next_step_changes_is_copied_before_it_does(keeping: Keeping) -> None:
    training = Training()
    training.step()
    for step in range(1, 6):
        before = training.values()
        keeping.keep(training.state(step), training.objects.steady(), save=False)
        training.step()
        keeping.settle(wait=True)
        assert differing(before, held(step)) == []
        assert len(differing(before, training.values())) > 5, "the training has gone on"


def test_a_model_whose_optimizer_is_not_known_is_copied_at_once(keeping: Keeping) -> None:
    training = Training(optimizer=False)
    before = training.values()
    keeping.keep(training.state(1), training.objects.steady(), save=False)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    keeping.settle(wait=True)
    assert training.objects.steady() == set()
    assert differing(before, held(1)) == []


def test_snapshots_find_no_slot_only_when_all_are_needed(keeping: Keeping) -> None:
    training = Training()
    for step in range(8):
        keeping.keep(training.state(step), training.objects.steady(), save=False)
    keeping.settle(wait=True)
    assert (keeping.counted.snapshots, keeping.counted.skipped) == (8, 0)


def test_without_room_in_memory_the_state_is_saved_here_and_now(tmp_path: Path, keeping: Keeping) -> None:
    keeping._slots = None  # as after NoRoom
    training = Training()
    keeping.keep(training.state(4), training.objects.steady(), save=True)
    assert (tmp_path / "step-000000000004" / "MANIFEST.json").exists()
