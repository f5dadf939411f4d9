"""A rank that moves to another node finds its state there, whichever holder dies."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dalsegno.train.keeper.holdings import listen
from dalsegno.train.keeper.transfer import HolderOrder
from dalsegno.train.memory.snapshot import SnapshotVerdict, open_snapshot, state_of, verify
from dalsegno.train.state import TrainingState
from dalsegno.wire.frames import Message
from tests.train.keeper.conftest import NewNode
from tests.train.keeper.nodes import Node
from tests.train.keeper.relay import cut_after, flip_at, relay
from tests.train.keeper.test_copies import set_safe
from tests.train.memory.states import filled, same

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part


def three(node: NewNode, state: TrainingState) -> tuple[Node, Node, Node]:
    """Return three nodes: the first has the snapshot, the second a copy, the third is new."""
    one, other, third = node("one"), node("other"), node("third")
    for each in (other, third):
        each.keep()
    one.keep(other.address)
    one.commit(state)
    one.until(one.sent)
    return one, other, third


def loaded(answer: Message) -> TrainingState:
    shared, own = (open_snapshot(Path(answer[part])) for part in ("shared", "own"))
    assert shared and own
    assert verify(shared.path) == verify(own.path) == SnapshotVerdict.WHOLE
    return state_of(shared, own)


def test_each_part_is_fetched_from_its_holder(node: NewNode) -> None:
    state = filled(5, rank=2, world=4)
    one, other, third = three(node, state)
    answer = third.fetch(2, 5, own=[other.address], shared=[one.address])
    assert answer["ok"] and answer["why"] == "" and same(loaded(answer), state)
    listed = [(kept["copy"], kept["own"], kept["shared"], kept["summed"]) for kept in third.kept]
    assert listed == [(True, True, False, True), (True, False, True, True)]
    again = third.fetch(2, 5)
    assert [again[part] for part in ("own", "shared")] == [answer[part] for part in ("own", "shared")]


def test_local_parts_are_not_fetched(node: NewNode) -> None:
    one, other, _ = three(node, filled(5))
    here = one.fetch(0, 5)
    assert here["own"] == here["shared"] == str(one.path(one.held()[0]))
    beside = other.fetch(0, 5, shared=[one.address])
    assert beside["own"] == str(other.path(other.copies()[0])) and same(loaded(beside), filled(5))


def test_second_holder_continues_where_the_first_died(node: NewNode) -> None:
    state = filled(5, elements=250_000)
    one, other, third = three(node, state)
    with relay(one.address, back=cut_after(3_000_000)) as dies, relay(other.address, back=cut_after(1_100_000)) as rest:
        answer = third.fetch(0, 5, own=[dies, rest], shared=[one.address])
    assert answer["ok"] and same(loaded(answer), state)


def test_fetch_succeeds_if_the_first_holder_is_gone(node: NewNode) -> None:
    one, other, third = three(node, filled(5))
    gone = node("gone")
    gone.kill()
    answer = third.fetch(0, 5, own=[gone.address, other.address], shared=[gone.address, one.address])
    assert answer["ok"] and same(loaded(answer), filled(5))


def test_damage_in_transit_is_detected_and_another_holder_is_used(node: NewNode) -> None:
    state = filled(5, elements=50_000)
    one, other, third = three(node, state)
    with relay(one.address, back=flip_at(300_000)) as spoiled:
        answer = third.fetch(0, 5, own=[spoiled], shared=[one.address])
        assert not answer["ok"] and "changed in transit" in answer["why"]
        assert third.held() == [] and os.listdir(third.folder) == []
        answer = third.fetch(0, 5, own=[spoiled, other.address], shared=[one.address])
    assert answer["ok"] and same(loaded(answer), state)


def test_missing_part_is_reported_and_nothing_is_left(node: NewNode) -> None:
    one, other, third = three(node, filled(5))
    for rank, step in ((0, 6), (1, 5)):
        answer = third.fetch(rank, step, own=[one.address, other.address], shared=[one.address])
        assert not answer["ok"] and "no longer has it" in answer["why"]
    assert "no node is known to have it" in third.fetch(0, 5)["why"]
    assert os.listdir(third.folder) == []


def test_fetch_waits_for_a_holder_whose_keeper_is_starting(node: NewNode) -> None:
    """The agent of the holder has restarted and opened the port."""
    one, third, port = node("one"), node("third"), listen()
    for each in (one, third):
        each.keep()
    one.commit(filled(5))
    one.until(lambda: one.kept)
    one.kill()
    address = ["127.0.0.1", port.getsockname()[1], "one"]
    what = {"number": 7, "rank": 0, "generation": 1, "step": 5}
    third.order({"fetch": {**what, "own": [address], "shared": [address]}})
    third.listen(0.2)
    one.start(port)
    one.keep()
    answer = third.until(lambda: next((received for received in third.received if received.get("fetched") == 7), None))
    assert answer["ok"] and same(loaded(answer), filled(5))


def test_silent_holder_is_retried_for_a_while_and_a_refusing_one_once() -> None:
    slow, dead = ("slow", 1), ("dead", 1)
    turns = HolderOrder([slow, dead], began=0.0)
    asked = []
    for second in range(100):
        if turns.waiting:
            asked.append(turns.next())
            turns.failed(asked[-1], slow=asked[-1] == slow, now=float(second))
    assert asked.count(dead) == 2 and 20 < asked.count(slow) < 60


def test_shared_part_is_fetched_once_for_several_ranks(node: NewNode) -> None:
    one, third = node("one"), node("third")
    for each in (one, third):
        each.keep()
    for rank in range(4):
        one.commit(filled(3, elements=200_000, rank=rank, world=4))
    for rank in range(4):
        what = {"number": rank, "rank": rank, "generation": 1, "step": 3}
        third.order({"fetch": {**what, "own": [one.address], "shared": [one.address]}})
    done = third.until(lambda: len(answers := [one for one in third.received if "fetched" in one]) == 4 and answers)
    assert all(same(loaded(answer), filled(3, elements=200_000, rank=answer["fetched"], world=4)) for answer in done)
    assert len({answer["shared"] for answer in done}) == 1 and len(os.listdir(third.folder)) == 5


def test_fetched_parts_are_removed_when_a_newer_step_is_safe(node: NewNode) -> None:
    one, _, third = three(node, filled(5))
    third.keep(generation=2, resumed=5)
    assert third.fetch(0, 5, own=[one.address], shared=[one.address])["ok"]
    set_safe(third, 2, 5, made_in=1)
    third.commit(filled(6), generation=2, resumed=5)
    third.until(lambda: [kept for kept in third.kept if kept["step"] == 6])
    assert len(third.copies()) == 2
    set_safe(third, 2, 6)
    third.commit(filled(7), generation=2, resumed=5)
    third.until(lambda: not third.copies())
