"""Random numbers go on where they were, with another number of ranks too: no rank draws again what it has drawn."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.rank_state import Own, digest, seed_for


def drawn() -> list[float]:
    return [*torch.rand(3).tolist(), random.random()]


def saved(seeds: list[int]) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """What ranks with these seeds have of their own after some steps, and what each would draw next."""
    owns, nexts = [], []
    for seed in seeds:
        torch.manual_seed(seed)
        random.seed(seed)
        drawn()
        owns.append(Own(None).take())
        nexts.append(drawn())
    return owns, nexts


def resumed(owns: list[dict[str, Any]], world: int, by_rank: bool = False) -> list[list[float]]:
    """What each of so many ranks draws; new ones have found what the first one had. `by_rank`: as the script seeds."""
    then, found = len(owns), []
    loaded = [owns[rank] if rank < then else owns[0] for rank in range(world)]
    digests = [digest(own["random"]) for own in loaded]
    for rank in range(world):
        torch.manual_seed(0)  # as every script begins
        random.seed(0)
        own = Own(None)
        own.load(loaded[rank], then, world, seed_for(rank, digests, then, [str(n * by_rank) for n in range(world)]))
        own.give()
        found.append(drawn())
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_were_there_go_on_with_theirs(world: int) -> None:
    owns, nexts = saved([1, 2, 3])
    assert resumed(owns, world) == nexts[:world]


def test_new_ranks_draw_numbers_that_nobody_else_draws() -> None:
    owns, nexts = saved([1, 2])
    found = resumed(owns, 4)
    assert found[:2] == nexts
    assert len({tuple(numbers) for numbers in found}) == 4


def test_where_all_drew_the_same_so_do_new_ones() -> None:
    owns, nexts = saved([5, 5])
    assert resumed(owns, 4) == [nexts[0]] * 4


def test_one_rank_becomes_several_that_draw_the_same_if_the_script_seeds_them_so() -> None:
    owns, nexts = saved([5])
    assert resumed(owns, 2) == [nexts[0]] * 2
    first, second = resumed(owns, 2, by_rank=True)
    assert first == nexts[0] != second


class Cache:
    """Something that each rank has its own of."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor([value])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "seen": [1, (2, self.value)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_what_a_rank_calls_its_own_comes_back_to_it_and_to_no_other() -> None:
    saved = Own(None, {"cache": Cache(3.0)}).take(rank=1)
    there, elsewhere = Cache(0.0), Cache(0.0)
    assert Own(None, {"cache": there}).load_per_rank(saved, rank=1) == [] and there.value.item() == 3.0
    assert Own(None, {"cache": elsewhere}).load_per_rank(saved, rank=2) == ["cache"]
    assert elsewhere.value.item() == 0.0
    assert Own(None, {"cache": elsewhere}).load_per_rank(Own(None).take(), rank=0) == ["cache"]
