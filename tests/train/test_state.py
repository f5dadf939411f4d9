"""A state that is split and rebuilt is unchanged, and has the names that torch's own loader expects."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.nested import empty_out, fill_in
from dalsegno.train.state import rebuild_state, take


def again(nested: dict[str, Any]) -> dict[str, Any]:
    state = take(nested, own=None, step=0, rank=0, world=1)
    return rebuild_state(state.shell, {piece.key: piece.tensor for piece in state.pieces})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and type(one) is type(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def trained(optimizer: str, **options: Any) -> tuple[Any, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    opt = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, **options)
    model(torch.randn(5, 3)).sum().backward()
    opt.step()
    return model, opt


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "NAdam"])
def test_model_and_optimizer_are_restored(optimizer: str) -> None:
    model, opt = trained(optimizer)
    nested = {"model": model.state_dict(), "optimizer": opt.state_dict()}
    assert same(again(nested), nested)


def test_int_keys_empty_dicts_tuples_and_ordered_dicts_are_restored() -> None:
    nested = {
        "a": {"state": {}, "groups": [{"lr": 0.1, "params": [0, 1]}], 7: torch.ones(2)},
        "b": collections.OrderedDict(pair=(torch.zeros(1), 3), nothing=None, words=["x", "y"]),
    }
    assert same(again(nested), nested)


def test_shells_name_the_placeholder_as_in_checkpoints_of_all_versions() -> None:
    written = pickle.dumps(empty_out({"w": torch.zeros(1)})[0], protocol=2)
    assert b"cdalsegno.train.nested\nHole\n" in written
    assert fill_in(pickle.loads(written), {"w": torch.ones(1)}) == {"w": torch.ones(1)}


def test_names_are_those_of_torchs_distributed_checkpoint() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    model, opt = trained("Adam")
    nested = {"model": model.state_dict(), "optimizer": opt.state_dict(), "list": [[torch.ones(1)], [{"a": 1}]]}
    _, tensors, values = empty_out(nested)
    flat, _ = flatten_state_dict(nested)
    assert set(flat) == set(tensors) | set(values)
    assert {key for key, value in flat.items() if isinstance(value, torch.Tensor)} == set(tensors)


def test_two_entries_with_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.b"):
        empty_out({"a": {"b": 1}, "a.b": 2})


def test_state_is_taken_without_a_copy() -> None:
    weight = torch.ones(4)
    (piece,) = take({"w": weight}, own=None, step=3, rank=0, world=1).pieces
    assert piece.tensor.data_ptr() == weight.data_ptr()
    assert (piece.size, piece.offsets, piece.shared) == ((4,), (0,), True)
