"""Messages of a coordinator about snapshots in memory."""

from __future__ import annotations

from typing import Any

from dalsegno.runs.coordinator.agents.messages import WorkersResumed
from dalsegno.runs.coordinator.generations.group import GroupPlace, Members
from dalsegno.runs.coordinator.generations.memory import MemoryTable
from dalsegno.runs.coordinator.generations.snapshots import HeldSnapshot
from dalsegno.train.memory.safe_steps import NOWHERE, SafeSteps, parse_safe_steps

TWO = Members(3, (GroupPlace("a", 0, 0), GroupPlace("b", 1, 1)), 1)
A, B = ("10.0.0.1", 700), ("10.0.0.2", 700)


def held(rank: int, step: int, generation: int = 3, shared: bool = True, **more: Any) -> HeldSnapshot:
    return HeldSnapshot(rank, step, generation, 2, shared=shared, **more)


def resume(memory: MemoryTable, group: Members = TWO) -> Any:
    """Return the resume orders of all nodes."""
    order = [memory.start(group, agent, 0.0)["resume"] for agent in group.agents]
    if order[0] is None:
        return None
    return {**order[0], **{part: {r: at for each in order for r, at in each[part].items()} for part in ("own", "of")}}


def safe(memory: MemoryTable, group: Members = TWO) -> SafeSteps:
    return parse_safe_steps(memory.start(group, group.agents[0], 0.0)["safe"])


def safe_messages(memory: MemoryTable, now: float = 0.0) -> list[tuple[str, SafeSteps]]:
    return [(node, parse_safe_steps(word["safe"])) for node, word in memory.updates(TWO, now) if "safe" in word]


def both(step: int, generation: int) -> list[HeldSnapshot]:
    return [held(rank, step, generation) for rank in (0, 1)]


def test_ranks_with_local_snapshots_need_no_keeper() -> None:
    memory = MemoryTable()
    memory.update("a", [held(0, 10, generation=2)])
    memory.update("b", [held(1, 10, generation=2)])
    assert resume(memory) == {"generation": 2, "step": 10, "own": {"0": [], "1": []}, "of": {}, "shared": []}


def test_rank_without_a_snapshot_learns_its_sources() -> None:
    memory = MemoryTable()
    memory.update("a", [held(0, 10, 2), held(1, 10, 2, shared=False)], A)
    memory.update("b", [])
    order = resume(memory)
    assert (order["own"]["1"], order["shared"]) == ([[*A, "a"]], [[*A, "a"]])


def test_unreachable_step_is_not_resumed() -> None:
    memory = MemoryTable()
    memory.update("a", [held(0, 10, 2), held(1, 10, 2, shared=False)])
    assert resume(memory) is None


def test_reachable_older_step_is_preferred_to_an_unreachable_newer_one() -> None:
    memory = MemoryTable()
    memory.update("a", [held(0, 9, 2), *both(10, 2)])
    memory.update("b", [held(1, 9, 2)])
    assert resume(memory)["step"] == 9


def test_snapshots_of_a_lost_node_are_forgotten() -> None:
    memory = MemoryTable()
    memory.update("a", [held(0, 10, 2)], A)
    memory.update("b", [held(1, 10, 2)], B)
    memory.lost("b")
    assert resume(memory) is None


def explain(memory: MemoryTable, step: int, from_memory: bool = False) -> str:
    memory.start(TWO, "a", 0.0)
    return memory.explain_resume(WorkersResumed(3, step, from_memory))


def test_resume_from_disk_names_the_copies_that_were_late() -> None:
    memory = MemoryTable()
    memory.update("a", [held(0, 678, 2), held(0, 590, 2), held(1, 590, 2, shared=False)], A)
    memory.update("b", [])
    late = "resumed from disk at step 600: the newest memory snapshot (step 678) was incomplete: "
    older = "rank 1's copy was missing on its buddy; the newest complete one was older (step 590)"
    assert explain(memory, 600) == late + older
    assert explain(memory, 590, from_memory=True) == ""
    assert explain(memory, 700) == (
        "resumed from disk at step 700: the newest complete memory snapshot was older (step 590)"
    )
    again = MemoryTable()
    again.update("a", [held(0, 678, 2)], A)
    again.update("b", [])
    assert explain(again, 600) == late + "rank 1's copy was missing on its buddy"


def test_resume_from_disk_says_that_a_rank_could_not_load_from_memory() -> None:
    memory = MemoryTable()
    memory.update("a", both(678, 2), A)
    memory.update("b", [])
    assert explain(memory, 600).endswith("a rank could not load the memory snapshot of step 678")


def test_resume_from_disk_without_snapshots_in_memory_needs_no_reason() -> None:
    memory = MemoryTable()
    memory.update("a", [])
    memory.update("b", [])
    assert explain(memory, 600) == ""
    memory.update("a", both(10, 2), A)
    assert memory.explain_resume(WorkersResumed(2, 600, False)) == "", "of an earlier generation"


def test_growing_run_without_shards_resumes_from_any_rank() -> None:
    three = Members(3, (GroupPlace("a", 0, 0), GroupPlace("b", 1, 1), GroupPlace("c", 2, 2)), 1)
    for sharded in (False, True):
        memory = MemoryTable()
        memory.update("a", [held(0, 10, 2, sharded=sharded)], A)
        memory.update("b", [held(1, 10, 2, sharded=sharded)], B)
        memory.update("c", [])
        order = resume(memory, three)
        assert (order is None) == sharded
    memory = MemoryTable()
    memory.update("a", [held(0, 10, 2, sharded=False)], A)
    memory.update("c", [])
    order = resume(memory, three)
    assert (order["of"], order["own"]["2"]) == ({"1": 0, "2": 0}, [[*A, "a"]])


def test_node_learns_its_buddy_at_the_start_and_after_changes() -> None:
    memory = MemoryTable()
    memory.update("a", [], A)
    memory.update("b", [], B)
    assert [memory.start(TWO, node, 0.0)["buddy"] for node in "ab"] == [[*B, "b"], [*A, "a"]]
    assert memory.updates(TWO, 0.0) == []
    memory.update("b", [], ("10.0.0.2", 800))
    assert memory.updates(TWO, 0.0) == [("a", {"buddy": {"address": ["10.0.0.2", 800, "b"]}})]


def test_all_nodes_learn_the_safe_step() -> None:
    memory = MemoryTable()
    memory.update("a", [], A)
    memory.update("b", [], B)
    assert safe(memory) == SafeSteps(3)
    memory.update("a", [held(0, 10), held(1, 10, shared=False)])
    memory.update("b", [held(1, 10)])
    assert safe_messages(memory) == []
    memory.update("b", [held(1, 10), held(0, 10, shared=False)])
    assert safe_messages(memory) == [(node, SafeSteps(3, (3, 10))) for node in "ab"]


def test_generation_resumed_from_one_node_keeps_the_previous_safe_step() -> None:
    memory, before = MemoryTable(), Members(2, TWO.places, 1)
    memory.update("a", [], A)
    memory.update("b", [], B)
    memory.start(before, "a", 0.0)
    memory.update("a", [*both(10, 2), held(0, 12, 2)])
    memory.update("b", [*both(10, 2), held(1, 12, 2)])
    memory.updates(before, 0.0)
    assert safe(memory) == SafeSteps(3, (2, 10), resumed=(2, 12))


def test_nothing_is_replicated_if_a_node_has_no_keeper() -> None:
    memory = MemoryTable()
    memory.update("a", [], A)
    memory.update("b", [], B)
    memory.forget_keeper("b")
    assert memory.start(TWO, "a", 0.0)["safe"] is None


def test_single_node_has_no_buddy() -> None:
    alone, memory = Members(3, TWO.places[:1], 1), MemoryTable()
    memory.update("a", [], A)
    assert memory.start(alone, "a", 0.0) == {"resume": None, "buddy": None, "safe": None}


def test_successor_uses_the_highest_safe_step_of_any_agent() -> None:
    """An agent with a higher safe step may already have overwritten snapshots that the others still have."""
    memory = MemoryTable()
    memory.update("a", both(10, 3), A, SafeSteps(3, (3, 8), resumed=(2, 3), floor=12))
    memory.updates(TWO, 0.0)
    assert safe_messages(memory) == [], "only after all have reported"
    memory.update("b", both(10, 3), B, SafeSteps(3, (3, 7), resumed=(2, 3)))
    assert safe_messages(memory) == [(node, SafeSteps(3, (3, 8), (2, 3), 12)) for node in "ab"], "step ten was skipped"


def test_safe_step_survives_the_end_of_coordinator_and_generation() -> None:
    memory = MemoryTable()
    memory.update("a", [*both(8, 2), held(0, 9, 2)], A, SafeSteps(2, (2, 8)))
    memory.update("b", [*both(8, 2), held(1, 9, 2)], B, SafeSteps(2, NOWHERE))
    assert safe(memory) == SafeSteps(3, (2, 8), resumed=(2, 9))
