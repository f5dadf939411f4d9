"""The choice of the step from which a generation resumes."""

from __future__ import annotations

from dalsegno.runs.coordinator.generations.snapshots import HeldSnapshot, Resume, buddies, choose


def held(rank: int, step: int, generation: int = 1, world: int = 2) -> HeldSnapshot:
    return HeldSnapshot(rank, step, generation, world)


def copy(rank: int, step: int, generation: int = 1, world: int = 2) -> HeldSnapshot:
    """Return the part that a buddy holds, which is only the rank's own part."""
    return HeldSnapshot(rank, step, generation, world, shared=False)


def test_newest_step_of_all_ranks_is_chosen() -> None:
    holdings = {"a": [held(0, 10), held(0, 20)], "b": [held(1, 10)]}
    assert choose(holdings, 2) == Resume((1, 10), {0: ("a",), 1: ("b",)}, ("a", "b"), {0: 0, 1: 1})


def test_rank_of_a_lost_node_is_found_at_its_buddy() -> None:
    assert choose({"a": [held(0, 10), copy(1, 10)]}, 2) == Resume((1, 10), {0: ("a",), 1: ("a",)}, ("a",), {0: 0, 1: 1})


def test_step_without_a_common_part_is_not_whole() -> None:
    assert choose({"a": [copy(0, 10), copy(1, 10)]}, 2) is None


def test_fetched_common_part_is_not_an_own_part() -> None:
    assert choose({"a": [HeldSnapshot(0, 10, 1, 1, own=False)]}, 1) is None


def test_step_with_a_missing_rank_is_not_whole() -> None:
    assert choose({"a": [held(0, 10)]}, 2) is None
    assert choose({}, 1) is None


def test_later_generation_precedes_a_later_step() -> None:
    holdings = {"a": [held(0, 100), held(0, 85, generation=2)], "b": [held(1, 100), held(1, 85, generation=2)]}
    found = choose(holdings, 2)
    assert found is not None
    assert found.place == (2, 85)


def test_shards_of_another_number_of_ranks_do_not_fit() -> None:
    assert choose({"a": [held(0, 10)], "b": [held(1, 10)]}, 3) is None


def test_two_generations_are_never_mixed() -> None:
    assert choose({"a": [held(0, 10, generation=1)], "b": [held(1, 10, generation=2)]}, 2) is None


def test_unsharded_state_serves_any_number_of_ranks() -> None:
    alone = HeldSnapshot(1, 10, 1, world=2, sharded=False)
    assert choose({"b": [alone]}, 3) == Resume((1, 10), dict.fromkeys(range(3), ("b",)), ("b",), {0: 1, 1: 1, 2: 1})
    assert choose({"b": [alone]}, 2) is None, "the same ranks need an exact or older step"


def test_buddies_form_a_ring() -> None:
    assert buddies(["a", "b", "c"]) == {"a": "b", "b": "c", "c": "a"}
    assert buddies(["a"]) == {}
