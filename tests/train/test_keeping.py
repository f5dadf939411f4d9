"""A snapshot holds the step it was taken at, whatever the training does while it is copied."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.memory.files import own_folder, safe_name, slots_of, sweep
from dalsegno.train.memory.safe import Safe, write_safe
from dalsegno.train.memory.snapshot import open_snapshot, state_of
from dalsegno.train.saver import SaverTerms
from dalsegno.train.snapshots import Beside, Keeping
from dalsegno.train.state import Objects, TrainingState, take

RUN = f"test-keeping.{os.getpid()}"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def keeping(tmp_path: Path, said: list[str]) -> Iterator[Keeping]:
    terms = SaverTerms(str(tmp_path), RUN, 1, 0, 1, keep=3)
    kept = Keeping(terms, None, None, ranks_here=1, warn=said.append)
    yield kept
    kept.close()
    sweep(RUN)


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick the machine, a copy is not known to be complete before it is waited for."""
    monkeypatch.setattr(Beside, "done", lambda copy: False)


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

    def state(self, step: int) -> TrainingState:
        return take(self.objects.nested(), own=None, step=step, rank=0, world=1)

    def values(self) -> dict[str, Any]:
        return {piece.key: piece.tensor.clone() for piece in self.state(0).pieces}


def snapshots() -> list[Any]:
    found = [open_snapshot(own_folder() / str(name)) for name in slots_of(RUN)]
    return [each for each in found if each is not None]


def steps_held() -> list[int]:
    return [each.record.step for each in snapshots()]


def held(step: int) -> dict[str, Any]:
    (found,) = [each for each in snapshots() if each.record.step == step]
    return {piece.key: piece.tensor.clone() for piece in state_of(found).pieces}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in one if not torch.equal(one[key], other[key])]


def test_what_the_next_step_changes_is_copied_before_it_does(keeping: Keeping) -> None:
    training = Training()
    training.step()
    for step in range(1, 6):
        keeping.step_done()
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


def swap(training: Training) -> None:
    """As an average is swapped in, by some: torch counts no change."""
    for parameter in training.model.parameters():
        parameter.data.zero_()


def test_what_no_optimizer_announces_is_copied_at_once(keeping: Keeping) -> None:
    """As when a CUDA graph replays the steps."""
    training = Training()
    training.step()
    keeping.step_done()
    for step in (2, 3):
        keeping.step_done()
        before = training.values()
        keeping.keep(training.state(step), training.objects.steady(), save=False)
        swap(training)
        keeping.settle(wait=True)
        assert differing(before, held(step)) == []


def test_a_copy_that_a_step_has_passed_without_a_word_is_dropped_and_the_next_made_at_once(
    keeping: Keeping, said: list[str], under_way: None
) -> None:
    training = Training()
    training.step()
    keeping.step_done()
    keeping.keep(training.state(1), training.objects.steady(), save=True)
    swap(training)
    keeping.step_done()
    assert steps_held() == []
    assert "call settle()" in said[0] and keeping.counted.skipped == 1
    assert keeping.hear(), "it will be tried again"
    before = training.values()
    keeping.keep(training.state(2), training.objects.steady(), save=False)
    training.step()
    keeping.step_done()
    assert differing(before, held(2)) == [] and len(said) == 2


def test_a_copy_under_which_parameters_were_changed_by_hand_is_dropped(
    keeping: Keeping, said: list[str], under_way: None
) -> None:
    training = Training()
    training.step()
    keeping.step_done()
    keeping.keep(training.state(1), training.objects.steady(), save=False)
    training.model.load_state_dict({key: tensor * 2 for key, tensor in training.model.state_dict().items()})
    training.step()
    keeping.step_done()
    assert steps_held() == [] and len(said) == 1


def test_who_settles_before_changing_parameters_loses_nothing(keeping: Keeping, said: list[str]) -> None:
    training = Training()
    training.step()
    keeping.step_done()
    before = training.values()
    keeping.keep(training.state(1), training.objects.steady(), save=False)
    keeping.settle(wait=True)
    swap(training)
    training.step()
    keeping.step_done()
    assert differing(before, held(1)) == [] and said == []


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


def test_what_was_saved_here_does_not_wait_for_an_earlier_save_that_is_still_under_way(
    tmp_path: Path, keeping: Keeping, said: list[str]
) -> None:
    training = Training()
    write_safe(own_folder() / safe_name(RUN), Safe(1))  # no slot may be overwritten
    for step in (1, 2, 3):
        keeping.keep(training.state(step), training.objects.steady(), save=step == 1)
    keeping.settle(wait=True)
    assert keeping.busy and steps_held() == [1, 2, 3]
    keeping.keep(training.state(4), training.objects.steady(), save=True)
    assert (tmp_path / "step-000000000004" / "MANIFEST.json").exists()
    assert keeping.wait(4, 60.0) and said == []
