"""A snapshot contains the step at which it was taken, whatever training does during the copy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.memory.files import list_slots, own_folder, safe_name, sweep
from dalsegno.train.memory.safe_steps import SafeSteps, write_safe
from dalsegno.train.memory.snapshot import open_snapshot, state_of
from dalsegno.train.saver import SaverTerms
from dalsegno.train.snapshots import RankSnapshots, ThreadCopy
from dalsegno.train.state import Objects, TrainingState, take

RUN = f"test-keeping.{os.getpid()}"


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def keeping(tmp_path: Path, warned: list[str]) -> Iterator[RankSnapshots]:
    terms = SaverTerms(str(tmp_path), RUN, 1, 0, 1, keep=3)
    kept = RankSnapshots(terms, None, None, ranks_here=1, warn=warned.append)
    yield kept
    kept.close()
    sweep(RUN)


@pytest.fixture
def under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every copy appear incomplete until something waits for it, even on a fast machine."""
    monkeypatch.setattr(ThreadCopy, "done", lambda copy: False)


class Training:
    """A model large enough that its copy takes a while, with statistics that change in the forward pass."""

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
    found = [open_snapshot(own_folder() / str(name)) for name in list_slots(RUN)]
    return [each for each in found if each is not None]


def steps_held() -> list[int]:
    return [each.record.step for each in snapshots()]


def held(step: int) -> dict[str, Any]:
    (found,) = [each for each in snapshots() if each.record.step == step]
    return {piece.key: piece.tensor.clone() for piece in state_of(found).pieces}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in one if not torch.equal(one[key], other[key])]


def test_tensors_are_copied_before_the_next_step_changes_them(keeping: RankSnapshots) -> None:
    training = Training()
    training.step()
    for step in range(1, 6):
        keeping.step_done()
        before = training.values()
        keeping.keep(training.state(step), training.objects.steady(), save=False)
        training.step()
        keeping.settle(wait=True)
        assert differing(before, held(step)) == []
        assert len(differing(before, training.values())) > 5, "training has continued"


def test_model_without_a_known_optimizer_is_copied_at_once(keeping: RankSnapshots) -> None:
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
    """Change parameters through `.data`, which torch does not count as a change."""
    for parameter in training.model.parameters():
        parameter.data.zero_()


def test_tensors_are_copied_at_once_if_no_optimizer_announces_changes(keeping: RankSnapshots) -> None:
    """This is the case when a CUDA graph replays the steps."""
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


def test_copy_is_dropped_after_an_unannounced_step_and_later_ones_are_synchronous(
    keeping: RankSnapshots, warned: list[str], under_way: None
) -> None:
    training = Training()
    training.step()
    keeping.step_done()
    keeping.keep(training.state(1), training.objects.steady(), save=True)
    swap(training)
    keeping.step_done()
    assert steps_held() == []
    assert "call settle()" in warned[0] and keeping.counted.skipped == 1
    assert keeping.collect_results(), "a later save will be tried"
    before = training.values()
    keeping.keep(training.state(2), training.objects.steady(), save=False)
    training.step()
    keeping.step_done()
    assert differing(before, held(2)) == [] and len(warned) == 2


def test_copy_is_dropped_if_parameters_change_during_it(
    keeping: RankSnapshots, warned: list[str], under_way: None
) -> None:
    training = Training()
    training.step()
    keeping.step_done()
    keeping.keep(training.state(1), training.objects.steady(), save=False)
    training.model.load_state_dict({key: tensor * 2 for key, tensor in training.model.state_dict().items()})
    training.step()
    keeping.step_done()
    assert steps_held() == [] and len(warned) == 1


def test_settle_before_a_manual_change_keeps_the_snapshot(keeping: RankSnapshots, warned: list[str]) -> None:
    training = Training()
    training.step()
    keeping.step_done()
    before = training.values()
    keeping.keep(training.state(1), training.objects.steady(), save=False)
    keeping.settle(wait=True)
    swap(training)
    training.step()
    keeping.step_done()
    assert differing(before, held(1)) == [] and warned == []


def test_no_snapshot_is_skipped_while_a_slot_is_free(keeping: RankSnapshots) -> None:
    training = Training()
    for step in range(8):
        keeping.keep(training.state(step), training.objects.steady(), save=False)
    keeping.settle(wait=True)
    assert (keeping.counted.snapshots, keeping.counted.skipped) == (8, 0)


def test_state_is_saved_synchronously_if_memory_is_short(tmp_path: Path, keeping: RankSnapshots) -> None:
    keeping._slots = None  # the state after NotEnoughMemory
    training = Training()
    keeping.keep(training.state(4), training.objects.steady(), save=True)
    assert (tmp_path / "step-000000000004" / "MANIFEST.json").exists()


def test_synchronous_save_does_not_wait_for_an_earlier_running_save(
    tmp_path: Path, keeping: RankSnapshots, warned: list[str]
) -> None:
    training = Training()
    write_safe(own_folder() / safe_name(RUN), SafeSteps(1))  # no slot may be overwritten
    for step in (1, 2, 3):
        keeping.keep(training.state(step), training.objects.steady(), save=step == 1)
    keeping.settle(wait=True)
    assert keeping.busy and steps_held() == [1, 2, 3]
    keeping.keep(training.state(4), training.objects.steady(), save=True)
    assert (tmp_path / "step-000000000004" / "MANIFEST.json").exists()
    assert keeping.wait(4, 60.0) and warned == []
