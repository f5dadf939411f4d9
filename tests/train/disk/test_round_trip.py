"""Checkpoints are loaded by any number of ranks, by Dal Segno and by torch alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from dalsegno.train.disk.commit import commit
from dalsegno.train.disk.load import find_newest
from dalsegno.train.disk.write import write_share
from dalsegno.train.errors import CheckpointError
from dalsegno.train.state import TensorPiece, TrainingState, rebuild_state
from tests.train.disk.states import names, save, yes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def trained(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 50))
    opt = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(seed):
        model(torch.randn(5, 30)).sum().backward()
        opt.step()
    return model, opt


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("world", [1, 3, 4, 8])
def test_torch_alone_loads_the_checkpoint(tmp_path: Path, world: int) -> None:
    model, opt = trained(seed=2)
    save(tmp_path, {"model": model.state_dict(), "optimizer": opt.state_dict()}, 7, world)
    other, other_opt = trained(seed=1)
    state = {"model": other.state_dict(), "optimizer": other_opt.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "latest")
    other.load_state_dict(state["model"])
    other_opt.load_state_dict(state["optimizer"])
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(other_opt.state_dict(), opt.state_dict())


def test_torch_rebuilds_the_state_without_a_model(tmp_path: Path) -> None:
    model, opt = trained(seed=2)
    nested = {"model": dict(model.state_dict()), "optimizer": opt.state_dict(), "list": [{"a": torch.ones(2)}, 3]}
    save(tmp_path, nested, 7, world=2)
    dcp_to_torch_save(tmp_path / "latest", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=False)
    assert same(plain["model"]["0.weight"], nested["model"]["0.weight"])
    assert plain["optimizer"]["param_groups"] == opt.state_dict()["param_groups"]
    assert plain["list"][1] == 3


def test_state_survives_changes_of_the_number_of_ranks(tmp_path: Path) -> None:
    model, opt = trained(seed=2)
    nested: dict[str, Any] = {"model": dict(model.state_dict()), "optimizer": opt.state_dict()}
    for step, world in enumerate([4, 3, 8, 1]):
        save(tmp_path, nested, step, world)
        with _newest(tmp_path) as found:
            assert (found.step, found.world) == (step, world)
            again = load(found)
        assert same(again, nested)
        nested = again


def test_each_rank_loads_its_own_state(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(3)}, 7, world=2)
    with _newest(tmp_path) as found:
        assert [pickle.loads(found.own(rank)) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]
        assert found.own(2) is None


def test_every_rank_writes_only_its_share(tmp_path: Path) -> None:
    path = save(tmp_path, {"w": torch.ones(4 << 20)}, 1, world=4)
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 1.01 * (4 << 20)


ODD = {
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 7),
    "half": torch.randn(9, 9).bfloat16(),
    "tiny": torch.randn(40).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
    "waves": torch.randn(5, dtype=torch.complex64),
    "conjugated": torch.randn(5, dtype=torch.complex64).conj(),
    "turned": torch.randn(6, 300).t(),
    "stretched": torch.ones(1, 4).expand(3, 4),
    "window": torch.arange(1000)[100:200],
    "pictures": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    "wide": torch.randn(2, 70_000),
    "long": torch.randn(100_000).double(),
}


@pytest.mark.parametrize("world", [1, 3])
def test_tensors_of_every_kind_are_restored(tmp_path: Path, world: int) -> None:
    save(tmp_path, ODD, 1, world)
    with _newest(tmp_path) as found:
        again = load(found)
    for key, tensor in ODD.items():
        assert again[key].dtype == tensor.dtype and again[key].shape == tensor.shape, key
        assert same(again[key].contiguous().view(-1), tensor.resolve_conj().contiguous().view(-1)), key
    fresh = {key: torch.zeros_like(tensor).contiguous() for key, tensor in ODD.items()}
    dcp.load(fresh, checkpoint_id=tmp_path / "latest")
    assert all(torch.equal(fresh[key].float(), ODD[key].float()) for key in ("half", "tiny", "window", "wide"))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_large_tensors_are_restored_from_the_mapped_file(tmp_path: Path, world: int, dtype: Any) -> None:
    large = torch.arange(1200 * 1300).reshape(1200, 1300).to(dtype)
    save(tmp_path, {"large": large, "flat": large.flatten()}, 1, world)
    with _newest(tmp_path) as found:
        again = load(found)
    assert torch.equal(again["large"], large) and torch.equal(again["flat"], large.flatten())


def test_file_removed_while_reading_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = save(tmp_path, {"w": torch.ones(1 << 20)}, 1)
    with _newest(tmp_path) as found:
        (path / "__0_0.distcp").unlink()
        with pytest.raises(CheckpointError, match=r"cannot read .*No such file"):
            found.fill({"w": torch.zeros(1 << 20)})


def test_view_is_written_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    path = save(tmp_path, {"window": torch.zeros(10 << 20)[5:10]}, 1)
    assert (path / "__0_0.distcp").stat().st_size < 100_000


# Shards


def sharded(rank: int, world: int, rows: int = 10, writes: bool = True) -> TrainingState:
    """Return a rank's state as with fully_shard: equal parts, the last ones shorter or empty."""
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    per = -(-rows // world)
    part = whole[rank * per : (rank + 1) * per]
    piece = TensorPiece("model.w", part, (rows, 3), (min(rank * per, rows), 0), shared=False, writes=writes)
    return TrainingState(1, rank, world, (piece,), pickle.dumps({}), b"", {})


@pytest.mark.parametrize("world", [1, 2, 4, 7])
def test_shards_are_written_by_their_ranks_and_loaded_in_full(tmp_path: Path, world: int) -> None:
    for rank in range(world):
        write_share(tmp_path, sharded(rank, world), "run-a", 1)
    commit(tmp_path, 1, world, "run-a", 1, yes)
    state = {"model": {"w": torch.zeros(10, 3)}}
    dcp.load(state, checkpoint_id=tmp_path / "latest")
    assert torch.equal(state["model"]["w"], torch.arange(30.0).reshape(10, 3))


def test_missing_shard_is_detected_before_the_commit(tmp_path: Path) -> None:
    write_share(tmp_path, sharded(0, 2), "run-a", 1)
    write_share(tmp_path, sharded(1, 2, writes=False), "run-a", 1)
    with pytest.raises(CheckpointError, match=r"15 of the 30 elements of model\.w"):
        commit(tmp_path, 1, 2, "run-a", 1, yes)
    assert names(tmp_path) == []


def test_different_tensor_sizes_between_ranks_are_detected(tmp_path: Path) -> None:
    write_share(tmp_path, sharded(0, 2), "run-a", 1)
    write_share(tmp_path, sharded(1, 2, rows=12), "run-a", 1)
    with pytest.raises(CheckpointError, match="disagree on the size"):
        commit(tmp_path, 1, 2, "run-a", 1, yes)


# Mismatches


def test_changed_model_is_refused_with_the_tensor_name(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(3), "v": torch.ones(2)}, 1)
    with _newest(tmp_path) as found:
        with pytest.raises(CheckpointError, match=r"w has size \(4,\), but \(3,\)"):
            found.fill({"w": torch.ones(4)})
        with pytest.raises(CheckpointError, match="has no a, b"):
            found.fill({"w": torch.ones(3), "a": torch.ones(1), "b": torch.ones(1)})


def _newest(folder: Path) -> Any:
    found = find_newest(folder, warn=pytest.fail)
    assert found
    return found


def load(found: Any) -> dict[str, Any]:
    tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in found.sizes.items()}
    found.fill(tensors)
    return rebuild_state(found.shell, tensors)
