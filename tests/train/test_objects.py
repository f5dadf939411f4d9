"""Objects save and restore their state, wrapped or not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.errors import CheckpointError
from dalsegno.train.state import Objects, take


def training(seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.Adam(model.parameters(), lr=0.1)
    return model, opt, torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)


def step(model: Any, opt: Any, sched: Any) -> None:
    opt.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    opt.step()
    sched.step()


def objects(model: Any, opt: Any, sched: Any) -> Objects:
    return Objects({"model": model, "optimizer": opt, "scheduler": sched})


def saved(objects: Objects) -> tuple[bytes, dict[str, Any]]:
    state = take(objects.nested(), own=None, step=1, rank=0, world=1)
    return state.shell, {piece.key: piece.tensor for piece in state.pieces}


def test_training_resumes_without_a_difference() -> None:
    one = training(1)
    for _ in range(3):
        step(*one)
    shell, tensors = saved(objects(*one))
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    other = training(2)
    objects(*other).restore(shell, tensors)
    step(*one)
    step(*other)
    assert torch.equal(one[0].weight, other[0].weight)
    assert one[2].get_last_lr() == other[2].get_last_lr()


def test_restored_state_does_not_share_memory_with_the_file() -> None:
    model, opt, sched = training(1)
    step(model, opt, sched)
    shell, tensors = saved(Objects({"model": model, "optimizer": opt}))
    given = {key: tensor.clone() for key, tensor in tensors.items()}
    Objects({"model": model, "optimizer": opt}).restore(shell, given)
    for tensor in given.values():
        tensor.zero_()
    assert model.weight.abs().sum() > 0
    assert all(state["exp_avg"].abs().sum() > 0 for state in opt.state.values())


def test_torch_compile_does_not_change_the_names() -> None:
    model = torch.nn.Linear(3, 2)
    _shell, tensors = saved(Objects({"model": torch.compile(model, backend="eager")}))
    assert set(tensors) == {"model.weight", "model.bias"}


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ({"model": 3}, "has no state_dict"),
        ({"a.b": torch.nn.Linear(1, 1)}, "invalid object name"),
        ({"dalsegno": torch.nn.Linear(1, 1)}, "invalid object name"),
    ],
)
def test_object_that_cannot_be_saved_is_refused(named: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        Objects(named)


def test_checkpoint_of_another_model_is_refused_by_name() -> None:
    shell, tensors = saved(Objects({"model": torch.nn.Linear(3, 2)}))
    with pytest.raises(CheckpointError, match=r"(?s)does not fit `model`.*--fresh"):
        Objects({"model": torch.nn.Linear(4, 2)}).restore(shell, tensors)
    with pytest.raises(CheckpointError, match="has no `ema`"):
        Objects({"ema": torch.nn.Linear(3, 2)}).restore(shell, tensors)
