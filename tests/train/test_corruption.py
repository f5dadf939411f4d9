"""Tests of the check for silent data corruption: digests, witnesses, verdicts, and that training is not disturbed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.corruption import (
    GradientCheck,
    digest_tensors,
    flip_bit,
    judge_gradients,
    pack_step,
    unpack_step,
    witness_shifts,
)
from dalsegno.train.errors import CheckpointError
from dalsegno.train.ranks import LocalRankStore, RankPlace

ALONE = RankPlace("run", 1, 0, 1, 1, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_digest_changes_with_every_single_bit(dtype: torch.dtype) -> None:
    tensor = torch.randn(257, generator=torch.Generator().manual_seed(1)).to(dtype)
    digests = {digest_tensors([tensor])}
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    for index in (0, 1, 256):
        for bit in range(8 * flat.element_size() - 1):
            flat.view(bits)[index] ^= 1 << bit
            digests.add(digest_tensors([tensor]))
            flat.view(bits)[index] ^= 1 << bit
    assert len(digests) == 1 + 3 * (8 * flat.element_size() - 1)


def test_digest_distinguishes_shapes_orders_and_missing_gradients() -> None:
    a, b = torch.arange(6.0), torch.arange(6.0).flip(0)
    kinds = [[a, b], [b, a], [a.view(2, 3), b], [a, None], [a], [a.to(torch.float64), b], [torch.cat([a, b])]]
    assert len({digest_tensors(each) for each in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("nodes", "shifts"),
    [
        ("a", (0,)),
        ("ab", (1,)),
        ("aa", (1,)),
        ("abc", (1, 2)),
        ("abcd", (1, 2)),
        ("aabb", (2, 1)),
        ("a" * 8 + "b" * 8 + "c" * 8, (8, 16)),
    ],
)
def test_witnesses_are_on_the_next_nodes(nodes: str, shifts: tuple[int, ...]) -> None:
    assert witness_shifts(list(nodes)) == shifts


@pytest.mark.parametrize("nodes", ["aabbbb", "aaaabb", "abab", "aaa"])
def test_witnesses_are_the_next_ranks_if_ranks_are_uneven_or_on_one_node(nodes: str) -> None:
    assert witness_shifts(list(nodes)) == (1, 2)


NODES = ["a", "b", "c"]


def test_rank_that_two_others_contradict_is_blamed() -> None:
    """Rank 1 is wrong as the owner of its step, and as the witness of rank 0."""
    own = ["zero", "bad1", "two"]
    verdict = judge_gradients(48, NODES, own, {1: ["bad0", "one", "two"], 2: ["zero", "one", "bad2"]})
    assert (verdict.wrong, verdict.node, verdict.differing) == ((1,), "b", (0, 1))
    assert verdict.text == "wrong gradients in step 48: rank 1 got bad0, ranks 0 on a and 2 on c got zero"


def test_no_rank_is_blamed_if_the_step_is_not_repeatable() -> None:
    verdict = judge_gradients(8, NODES, ["1", "2", "3"], {1: ["4", "5", "6"], 2: ["7", "8", "9"]})
    assert verdict.wrong == () and "is the step repeatable" in verdict.text


def test_no_rank_is_blamed_if_ranks_on_two_nodes_are_in_the_minority() -> None:
    verdict = judge_gradients(8, NODES, ["bad", "1", "bad"], {1: ["0", "1", "2"], 2: ["0", "1", "2"]})
    assert verdict.wrong == () and verdict.differing == (0, 2)


def test_two_ranks_detect_a_difference_but_blame_no_rank() -> None:
    verdict = judge_gradients(8, ["a", "b"], ["0", "1"], {1: ["0", "bad"]})
    assert verdict.wrong == () and "three ranks are needed" in verdict.text


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))


def backward(module: torch.nn.Module, batch: torch.Tensor) -> None:
    module(batch).pow(2).mean().backward()


def test_check_leaves_gradients_random_states_and_buffers_as_they_were() -> None:
    model, batch = network(), torch.randn(16, 4)
    backward(model, batch)
    before = [parameter.grad for parameter in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check = GradientCheck(2, ALONE, LocalRankStore(), None)
    assert check.run(4, model, batch, backward) is None
    assert all(one is other.grad for one, other in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())


def test_check_finds_a_step_that_is_not_repeatable_even_on_one_rank() -> None:
    model, calls = network(), []

    def unstable(module: torch.nn.Module, batch: torch.Tensor) -> None:
        backward(module, batch + len(calls))
        calls.append(1)

    verdict = GradientCheck(2, ALONE, LocalRankStore(), None).run(4, model, torch.randn(16, 4), unstable)
    assert verdict is not None and verdict.wrong == () and verdict.differing == (0,)


def test_nothing_is_computed_at_other_steps() -> None:
    def fail(module: object, batch: object) -> None:
        raise AssertionError

    check = GradientCheck(2, ALONE, LocalRankStore(), None)
    assert check.run(5, network(), None, fail) is None
    assert GradientCheck(0, ALONE, LocalRankStore(), None).run(4, network(), None, fail) is None


def test_flipped_bit_changes_one_element_and_not_the_gradient_itself() -> None:
    gradient = torch.ones(3)
    assert flip_bit(gradient).tolist() == [1.5, 1.0, 1.0] and gradient.tolist() == [1.0] * 3


def test_packed_step_has_the_batch_and_the_random_states() -> None:
    batch = {"ids": torch.arange(3), "more": [torch.ones(2), (1, "x")]}
    step = unpack_step(pack_step(batch, network()))
    assert step["batch"]["ids"].tolist() == [0, 1, 2] and step["batch"]["more"][1] == (1, "x")
    assert torch.equal(step["random"]["torch"], torch.get_rng_state())
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} == set(step["buffers"])


def test_batch_with_code_of_its_own_is_refused() -> None:
    with pytest.raises(CheckpointError, match="verify\\(\\) cannot send this batch"):
        unpack_step(pack_step([LocalRankStore()], network()))
