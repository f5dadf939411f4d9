"""Tensors that differ between ranks: running statistics are taken from rank 0; any other tensor causes a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.disk.commit import commit
from dalsegno.train.disk.load import open_checkpoint
from dalsegno.train.disk.write import fingerprint, write_share
from dalsegno.train.memory.slots import Slots
from dalsegno.train.state import Objects, TensorPiece, TrainingState, take


def trained(rank: int) -> Any:
    """Return a model as under DDP: equal parameters on every rank, statistics of each rank's own batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.BatchNorm1d(300), torch.nn.BatchNorm1d(300))
    torch.manual_seed(rank)
    model(torch.randn(8, 4))
    return model


def state_of(model: Any, rank: int, world: int = 4) -> TrainingState:
    objects = Objects({"model": model})
    return take(objects.nested(), None, 7, rank, world, objects.apart())


def written(folder: Path, models: list[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the tensors of the checkpoint that these ranks write, and the warnings."""
    warned: list[str] = []
    for rank, model in enumerate(models):
        write_share(folder, state_of(model, rank, len(models)), "run", 1)
    path = commit(folder, 7, len(models), "run", 1, lambda: True, warn=warned.append)
    with open_checkpoint(path) as found:
        tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in found.sizes.items()}
        found.fill(tensors)
    return tensors, warned


def test_statistics_on_disk_are_those_of_the_first_rank(tmp_path: Path) -> None:
    models = [trained(rank) for rank in range(4)]
    tensors, warned = written(tmp_path, models)
    expected = {f"model.{key}": tensor for key, tensor in models[0].state_dict().items()}
    assert [key for key in expected if not torch.equal(tensors[key], expected[key])] == []
    assert warned == []


def test_snapshot_keeps_the_statistics_of_each_rank() -> None:
    pieces = {piece.key: piece for piece in state_of(trained(2), rank=2).pieces}
    assert not pieces["model.1.running_mean"].shared and pieces["model.0.weight"].shared


def test_large_integer_buffers_are_not_statistics() -> None:
    model = torch.nn.Module()
    model.register_buffer("mask", torch.ones(512, 512, dtype=torch.bool))
    model.register_buffer("mean", torch.ones(512, 512))
    assert Objects({"model": model}).apart() == {"model.mean"}


def test_parameters_that_differ_between_ranks_are_warned_of_by_name(tmp_path: Path) -> None:
    models = [trained(rank) for rank in range(3)]
    with torch.no_grad():
        models[2][0].weight[5, 1] += 1e-6
    _, warned = written(tmp_path, models)
    (warning,) = warned
    assert "ranks 0 and 2 have different values of model.0.weight:" in warning


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_fingerprint_depends_on_values_not_on_memory_layout(dtype: Any) -> None:
    values = torch.arange(12).reshape(3, 4).to(dtype)
    assert fingerprint(values) == fingerprint(values.t().contiguous().t())
    assert fingerprint(values) != fingerprint(values.flip(0))
    assert isinstance(fingerprint(torch.empty(0, dtype=dtype)), int) and isinstance(fingerprint(values[0, 0]), int)


def test_snapshot_with_rank_statistics_does_not_count_as_sharded(tmp_path: Path) -> None:
    slots = Slots("apart", 1, 1, folder=tmp_path)
    record = slots.write(state_of(trained(1), rank=1))
    shard = TensorPiece("w", torch.ones(2), (4,), (2,), shared=False)
    torn = slots.write(TrainingState(8, 1, 2, (shard,), b"", b"", {}))
    slots.close()
    assert record and not record.sharded
    assert torn and torn.sharded
