"""What a coordinator tells its agents of snapshots in memory."""

from __future__ import annotations

from typing import Any

from dalsegno.runs.coordinator.group import GroupPlace, Members
from dalsegno.runs.coordinator.memory import MemoryTable
from dalsegno.runs.coordinator.snapshots import HeldSnapshot
from dalsegno.train.memory.safe import NOWHERE, Safe, parse_word

TWO = Members(3, (GroupPlace("a", 0, 0), GroupPlace("b", 1, 1)), 1)
A, B = ("10.0.0.1", 700), ("10.0.0.2", 700)


def held(rank: int, step: int, generation: int = 3, shared: bool = True, **more: Any) -> HeldSnapshot:
    return HeldSnapshot(rank, step, generation, 2, shared=shared, **more)


def resume(memory: MemoryTable, group: Members = TWO) -> Any:
    """All that any of its nodes is told."""
    told = [memory.start(group, agent, 0.0)["resume"] for agent in group.agents]
    if told[0] is None:
        return None
    return {**told[0], **{part: {r: at for each in told for r, at in each[part].items()} for part in ("own", "of")}}


def safe(memory: MemoryTable, group: Members = TWO) -> Safe:
    return parse_word(memory.start(group, group.agents[0], 0.0)["safe"])


def safe_words(memory: MemoryTable, now: float = 0.0) -> list[tuple[str, Safe]]:
    return [(node, parse_word(word["safe"])) for node, word in memory.updates(TWO, now) if "safe" in word]


def both(step: int, generation: int) -> list[HeldSnapshot]:
    return [held(rank, step, generation) for rank in (0, 1)]


def test_ranks_that_have_all_at_home_need_no_keeper() -> None:
    memory = MemoryTable()
    memory.heard("a", [held(0, 10, generation=2)])
    memory.heard("b", [held(1, 10, generation=2)])
    assert resume(memory) == {"generation": 2, "step": 10, "own": {"0": [], "1": []}, "of": {}, "shared": []}


def test_who_has_nothing_is_told_where_it_is() -> None:
    memory = MemoryTable()
    memory.heard("a", [held(0, 10, 2), held(1, 10, 2, shared=False)], A)
    memory.heard("b", [])
    told = resume(memory)
    assert (told["own"]["1"], told["shared"]) == ([[*A, "a"]], [[*A, "a"]])


def test_what_nobody_can_send_is_not_counted_on() -> None:
    memory = MemoryTable()
    memory.heard("a", [held(0, 10, 2), held(1, 10, 2, shared=False)])
    assert resume(memory) is None


def test_an_older_step_within_reach_goes_before_a_newer_one_out_of_it() -> None:
    memory = MemoryTable()
    memory.heard("a", [held(0, 9, 2), *both(10, 2)])
    memory.heard("b", [held(1, 9, 2)])
    assert resume(memory)["step"] == 9


def test_what_a_lost_node_had_is_gone() -> None:
    memory = MemoryTable()
    memory.heard("a", [held(0, 10, 2)], A)
    memory.heard("b", [held(1, 10, 2)], B)
    memory.lost("b")
    assert resume(memory) is None


def test_a_run_that_grows_goes_on_from_any_ranks_state_where_no_rank_has_a_part_to_itself() -> None:
    three = Members(3, (GroupPlace("a", 0, 0), GroupPlace("b", 1, 1), GroupPlace("c", 2, 2)), 1)
    for sharded in (False, True):
        memory = MemoryTable()
        memory.heard("a", [held(0, 10, 2, sharded=sharded)], A)
        memory.heard("b", [held(1, 10, 2, sharded=sharded)], B)
        memory.heard("c", [])
        told = resume(memory, three)
        assert (told is None) == sharded
    memory = MemoryTable()
    memory.heard("a", [held(0, 10, 2, sharded=False)], A)
    memory.heard("c", [])
    told = resume(memory, three)
    assert (told["of"], told["own"]["2"]) == ({"1": 0, "2": 0}, [[*A, "a"]])


def test_each_node_hears_of_its_buddy_at_the_start_and_when_that_has_changed() -> None:
    memory = MemoryTable()
    memory.heard("a", [], A)
    memory.heard("b", [], B)
    assert [memory.start(TWO, node, 0.0)["buddy"] for node in "ab"] == [[*B, "b"], [*A, "a"]]
    assert memory.updates(TWO, 0.0) == []
    memory.heard("b", [], ("10.0.0.2", 800))
    assert memory.updates(TWO, 0.0) == [("a", {"buddy": {"address": ["10.0.0.2", 800, "b"]}})]


def test_all_hear_which_step_is_safe() -> None:
    memory = MemoryTable()
    memory.heard("a", [], A)
    memory.heard("b", [], B)
    assert safe(memory) == Safe(3)
    memory.heard("a", [held(0, 10), held(1, 10, shared=False)])
    memory.heard("b", [held(1, 10)])
    assert safe_words(memory) == []
    memory.heard("b", [held(1, 10), held(0, 10, shared=False)])
    assert safe_words(memory) == [(node, Safe(3, (3, 10))) for node in "ab"]


def test_a_generation_that_went_on_from_what_one_node_has_keeps_what_was_safe_before() -> None:
    memory, before = MemoryTable(), Members(2, TWO.places, 1)
    memory.heard("a", [], A)
    memory.heard("b", [], B)
    memory.start(before, "a", 0.0)
    memory.heard("a", [*both(10, 2), held(0, 12, 2)])
    memory.heard("b", [*both(10, 2), held(1, 12, 2)])
    memory.updates(before, 0.0)
    assert safe(memory) == Safe(3, (2, 10), resumed=(2, 12))


def test_where_a_node_can_keep_no_copies_nobody_waits_for_any() -> None:
    memory = MemoryTable()
    memory.heard("a", [], A)
    memory.heard("b", [], B)
    memory.forget_keeper("b")
    assert memory.start(TWO, "a", 0.0)["safe"] is None


def test_alone_nobody_has_copies() -> None:
    alone, memory = Members(3, TWO.places[:1], 1), MemoryTable()
    memory.heard("a", [], A)
    assert memory.start(alone, "a", 0.0) == {"resume": None, "buddy": None, "safe": None}


def test_a_coordinator_that_comes_back_goes_by_the_most_that_any_agent_was_told() -> None:
    """One of them may have overwritten what was given up."""
    memory = MemoryTable()
    memory.heard("a", both(10, 3), A, Safe(3, (3, 8), resumed=(2, 3), floor=12))
    memory.updates(TWO, 0.0)
    assert safe_words(memory) == [], "not before all are heard of"
    memory.heard("b", both(10, 3), B, Safe(3, (3, 7), resumed=(2, 3)))
    assert safe_words(memory) == [(node, Safe(3, (3, 8), (2, 3), 12)) for node in "ab"], "ten was given up"


def test_what_was_safe_before_both_the_coordinator_and_a_generation_ended_stays_safe() -> None:
    memory = MemoryTable()
    memory.heard("a", [*both(8, 2), held(0, 9, 2)], A, Safe(2, (2, 8)))
    memory.heard("b", [*both(8, 2), held(1, 9, 2)], B, Safe(2, NOWHERE))
    assert safe(memory) == Safe(3, (2, 8), resumed=(2, 9))
