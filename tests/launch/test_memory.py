"""What a coordinator tells its agents of snapshots in memory."""

from __future__ import annotations

from dalsegno.launch.group import Group, Place
from dalsegno.launch.memory import Memory
from dalsegno.launch.snapshots import Held

TWO = Group(3, (Place("a", 0, 0), Place("b", 1, 1)), 1)


def held(rank: int, step: int, generation: int = 3, shared: bool = True) -> Held:
    return Held(rank, step, generation, 2, shared=shared)


def test_ranks_that_have_all_at_home_need_no_keeper() -> None:
    memory = Memory()
    memory.heard("a", [held(0, 10, generation=2)])
    memory.heard("b", [held(1, 10, generation=2)])
    assert memory.resume(TWO) == {"generation": 2, "step": 10, "own": {"0": [], "1": []}, "shared": []}


def test_who_has_nothing_is_told_where_it_is() -> None:
    memory = Memory()
    memory.heard("a", [held(0, 10, 2), held(1, 10, 2, shared=False)], ("10.0.0.1", 700))
    memory.heard("b", [])
    told = memory.resume(TWO)
    assert told is not None
    assert (told["own"]["1"], told["shared"]) == ([["10.0.0.1", 700]], [["10.0.0.1", 700]])


def test_what_nobody_can_send_is_not_counted_on() -> None:
    memory = Memory()
    memory.heard("a", [held(0, 10, 2), held(1, 10, 2, shared=False)])
    assert memory.resume(TWO) is None


def test_what_a_lost_node_had_is_gone() -> None:
    memory = Memory()
    memory.heard("a", [held(0, 10, 2)], ("10.0.0.1", 700))
    memory.heard("b", [held(1, 10, 2)], ("10.0.0.2", 700))
    memory.lost("b")
    assert memory.resume(TWO) is None


def test_each_node_hears_of_its_buddy_once() -> None:
    memory = Memory()
    memory.heard("a", [], ("10.0.0.1", 700))
    memory.heard("b", [], ("10.0.0.2", 700))
    buddies = [said for said in memory.words(TWO) if "buddy" in said[1]]
    assert buddies == [
        ("a", {"buddy": {"address": ["10.0.0.2", 700]}}),
        ("b", {"buddy": {"address": ["10.0.0.1", 700]}}),
    ]
    assert memory.words(TWO) == []
    memory.heard("b", [], ("10.0.0.2", 800))
    assert memory.words(TWO) == [("a", {"buddy": {"address": ["10.0.0.2", 800]}})]


def test_all_hear_which_step_is_safe() -> None:
    memory = Memory()
    memory.heard("a", [held(0, 10), held(1, 10, shared=False)], ("10.0.0.1", 700))
    memory.heard("b", [held(1, 10)], ("10.0.0.2", 700))
    assert ("b", {"safe": {"generation": 3, "step": -1}}) in memory.words(TWO)
    memory.heard("b", [held(1, 10), held(0, 10, shared=False)])
    assert memory.words(TWO) == [(node, {"safe": {"generation": 3, "step": 10}}) for node in "ab"]
