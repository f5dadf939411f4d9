"""Random states are restored, also on another number of ranks: no rank draws the same numbers twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.rank_state import RankOwnState, digest, seed_for


def drawn() -> list[float]:
    return [*torch.rand(3).tolist(), random.random()]


def saved(seeds: list[int]) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Return the states of ranks with these seeds after some steps, and what each would draw next."""
    owns, nexts = [], []
    for seed in seeds:
        torch.manual_seed(seed)
        random.seed(seed)
        drawn()
        owns.append(RankOwnState(None).take())
        nexts.append(drawn())
    return owns, nexts


def resumed(owns: list[dict[str, Any]], world: int, by_rank: bool = False) -> list[list[float]]:
    """Return what each rank draws after a resume; new ranks load the first one's state. `by_rank`: seeds differ."""
    then, found = len(owns), []
    loaded = [owns[rank] if rank < then else owns[0] for rank in range(world)]
    digests = [digest(own["random"]) for own in loaded]
    for rank in range(world):
        torch.manual_seed(0)  # as scripts do at their start
        random.seed(0)
        own = RankOwnState(None)
        own.load(loaded[rank], then, world, seed_for(rank, digests, then, [str(n * by_rank) for n in range(world)]))
        own.restore_randomness()
        found.append(drawn())
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_existing_ranks_resume_their_random_states(world: int) -> None:
    owns, nexts = saved([1, 2, 3])
    assert resumed(owns, world) == nexts[:world]


def test_new_ranks_draw_distinct_random_numbers() -> None:
    owns, nexts = saved([1, 2])
    found = resumed(owns, 4)
    assert found[:2] == nexts
    assert len({tuple(numbers) for numbers in found}) == 4


def test_new_ranks_draw_the_same_numbers_if_all_ranks_did() -> None:
    owns, nexts = saved([5, 5])
    assert resumed(owns, 4) == [nexts[0]] * 4


def test_one_rank_becomes_two_with_equal_or_distinct_seeds_as_the_script_sets() -> None:
    owns, nexts = saved([5])
    assert resumed(owns, 2) == [nexts[0]] * 2
    first, second = resumed(owns, 2, by_rank=True)
    assert first == nexts[0] != second


class Cache:
    """An object with state per rank."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": [1, (2, self.value)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_per_rank_state_is_restored_only_on_its_rank() -> None:
    saved = RankOwnState(None, {"cache": Cache(3.0)}).take(rank=1)
    there, elsewhere = Cache(0.0), Cache(0.0)
    assert RankOwnState(None, {"cache": there}).load_per_rank(saved, rank=1) == [] and there.value.item() == 3.0
    assert RankOwnState(None, {"cache": elsewhere}).load_per_rank(saved, rank=2) == ["cache"]
    assert elsewhere.value.item() == 0.0
    assert RankOwnState(None, {"cache": elsewhere}).load_per_rank(RankOwnState(None).take(), rank=0) == ["cache"]


class SeedingLoader:
    """A loader that saves its position. As PyTorch's loaders do, it draws a seed for each iterator."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        torch.rand(1)
        return map(self._take, range(self.position + 1, 7))

    def _take(self, number: int) -> int:
        self.position = number
        return number

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def test_resumed_loader_draws_its_seed_without_changing_the_random_numbers_of_the_steps() -> None:
    loader = SeedingLoader()
    own = RankOwnState(loader)
    batches = iter(loader)
    seen = [(next(batches), torch.rand(1).item()) for _ in range(2)]
    kept = own.take()
    expected = [(number, torch.rand(1).item()) for number in batches]
    again = SeedingLoader()
    resumed = RankOwnState(again)
    torch.manual_seed(5)
    resumed.load(kept, world_then=1, world=1)
    resumed.restore_randomness()
    assert [(number, torch.rand(1).item()) for number in again] == expected and len(seen) + len(expected) == 6
