"""On a GPU: snapshots hold their step, whether the optimizer announces its steps or a CUDA graph replays them.

Run it with DALSEGNO_GPU_TESTS=yes; the rest of the suite hides the machine's GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU and DALSEGNO_GPU_TESTS=yes", allow_module_level=True)

from dalsegno.train.memory.files import list_slots, own_folder, sweep
from dalsegno.train.memory.snapshot import open_snapshot, state_of
from dalsegno.train.saver import SaverTerms
from dalsegno.train.snapshots import RankSnapshots
from dalsegno.train.state import Objects, TrainingState, take

RUN = f"test-gpu.{os.getpid()}"
WIDTH = 8192  # 256 MiB of weights: their copy takes longer than a step


class Training:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(WIDTH, WIDTH, bias=False).cuda()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=0.1, capturable=True)
        self.inputs = torch.randn(8, WIDTH, device="cuda")
        self.objects = Objects({"model": self.model, "optimizer": self.opt})

    def step(self) -> None:
        self.opt.zero_grad(set_to_none=False)
        self.model(self.inputs).square().mean().backward()
        self.opt.step()

    def captured(self) -> Callable[[], None]:
        """Return the same step, replayed by a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return lambda: graph.replay()

    def state(self, step: int) -> TrainingState:
        return take(self.objects.nested(), own=None, step=step, rank=0, world=1)

    def values(self) -> dict[str, Any]:
        return {piece.key: piece.tensor.cpu().clone() for piece in self.state(0).pieces}


@pytest.fixture
def warned() -> list[str]:
    return []


@pytest.fixture
def keeping(tmp_path: Path, warned: list[str]) -> Iterator[RankSnapshots]:
    kept = RankSnapshots(SaverTerms(str(tmp_path), RUN, 1, 0, 1, keep=3), None, None, ranks_here=1, warn=warned.append)
    yield kept
    kept.close()
    sweep(RUN)


def held() -> dict[int, dict[str, Any]]:
    found = [open_snapshot(own_folder() / str(name)) for name in list_slots(RUN)]
    states = [state_of(each) for each in found if each is not None]
    return {state.step: {piece.key: piece.tensor.clone() for piece in state.pieces} for state in states}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [key for key in one if not torch.equal(one[key], other[key])]


def torn(training: Training, keeping: RankSnapshots, step: Callable[[], None], steps: range) -> dict[int, list[str]]:
    """Train while each snapshot is copied. Return the tensors in memory that differ from their step."""
    wrong = {}
    for number in steps:
        torch.cuda.synchronize()
        before = training.values()
        keeping.keep(training.state(number), training.objects.steady(), save=False)
        step()
        keeping.step_done()
        keeping.settle(wait=True)
        wrong.update({at: keys for at, kept in held().items() if at == number and (keys := differing(before, kept))})
    return wrong


def test_optimizer_step_waits_for_the_copy(keeping: RankSnapshots, warned: list[str]) -> None:
    training = Training()
    training.step()
    keeping.step_done()
    assert torn(training, keeping, training.step, range(1, 6)) == {}
    assert sorted(held()) == [3, 4, 5] and warned == []


def test_snapshots_are_consistent_with_cuda_graph_steps(keeping: RankSnapshots, warned: list[str]) -> None:
    """The first snapshot begins after an announced step, as before a capture."""
    training = Training()
    for _ in range(3):
        training.step()
        keeping.step_done()
    replay = training.captured()
    assert torn(training, keeping, replay, range(1, 6)) == {}
    assert sorted(held()) == [3, 4, 5]
    assert [warning for warning in warned if "CUDA graph" in warning] == warned and len(warned) == 1


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS])
def test_restored_optimizer_shares_no_memory_with_the_snapshot(kind: Any) -> None:
    def build() -> tuple[Any, Any]:
        torch.manual_seed(2)
        model = torch.nn.Linear(64, 64, device="cuda")
        return model, kind(model.parameters(), lr=0.1)

    def values(objects: Objects) -> dict[str, Any]:
        return {
            piece.key: piece.tensor.cpu().clone() for piece in take(objects.nested(), None, 1, rank=0, world=1).pieces
        }

    def loss() -> Any:
        optimizer.zero_grad()
        found = model(torch.ones(4, 64, device="cuda")).square().mean()
        found.backward()
        return found

    model, optimizer = build()
    optimizer.step(loss)
    trained = Objects(dict(zip(("model", "optimizer"), (model, optimizer), strict=True)))
    expected, state = values(trained), take(trained.nested(), None, 1, rank=0, world=1)
    views = {piece.key: piece.tensor.cpu().clone() for piece in state.pieces}
    restored = Objects(dict(zip(("model", "optimizer"), build(), strict=True)))
    restored.restore(state.shell, views)
    for view in views.values():
        view.zero_()
    assert differing(expected, values(restored)) == []
