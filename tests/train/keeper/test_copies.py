"""Each rank's own part is copied to a buddy node, where only a complete copy counts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dalsegno.train.memory.files import safe_name
from dalsegno.train.memory.safe_steps import SafeSteps, write_safe
from dalsegno.train.memory.snapshot import SnapshotVerdict, open_snapshot, state_of, verify
from tests.train.keeper.conftest import NewNode
from tests.train.keeper.nodes import RUN, Node
from tests.train.keeper.relay import flip_at, held_back, relay
from tests.train.memory.states import filled, same
from tests.waiting import eventually

pytestmark = pytest.mark.cluster  # real processes: too slow for the unit part


def pair(node: NewNode, **more: object) -> tuple[Node, Node]:
    """Return two nodes; the second is the buddy of the first."""
    one, other = node("one"), node("other")
    other.keep()
    one.keep(other.address, **more)
    return one, other


def set_safe(node: Node, generation: int, step: int, made_in: int | None = None) -> None:
    write_safe(node.folder / safe_name(RUN), SafeSteps(generation, (made_in or generation, step)))


def test_copy_arrives_and_restores_the_state(node: NewNode) -> None:
    one, other = pair(node)
    state = filled(7, rank=3, world=8)
    one.commit(state)
    one.until(one.sent)
    assert one.kept == [
        {"rank": 3, "step": 7, "generation": 1, "world": 8, "copy": False, "own": True, "shared": True,
         "sharded": False, "summed": True, "sent": True}
    ]  # fmt: skip
    other.until(lambda: other.kept)
    assert other.kept == [{**one.kept[0], "copy": True, "shared": False, "sent": False}]
    (copy,), (whole,) = other.copies(), one.held()
    assert verify(other.path(copy)) == verify(one.path(whole)) == SnapshotVerdict.WHOLE
    shared, own = open_snapshot(one.path(whole)), open_snapshot(other.path(copy))
    assert shared and own and same(state_of(shared, own), state)


def test_copy_and_fetch_recreate_a_removed_folder(node: NewNode) -> None:
    """Another run of the user that ends on the node removes the empty folder."""
    one, other = pair(node)
    other.ready()
    other.folder.rmdir()
    one.commit(filled(7, rank=3, world=8))
    one.until(one.sent)
    assert [copy.record.step for copy in other.copies()] == [7]
    assert other.folder.stat().st_mode & 0o777 == 0o700
    third = node("third")
    third.keep()
    third.ready()
    third.folder.rmdir()
    assert third.fetch(3, 7, own=[other.address], shared=[one.address])["ok"]
    assert third.folder.stat().st_mode & 0o777 == 0o700


def test_every_rank_gets_its_turn_to_be_copied(node: NewNode) -> None:
    one, other = pair(node)
    for step in (1, 2):
        for rank in range(4):
            one.commit(filled(step, rank=rank, world=8))
    one.until(lambda: one.sent().count(2) == 4)
    assert {copy.rank for copy in other.copies() if copy.record.step == 2} == {0, 1, 2, 3}


def test_without_a_buddy_snapshots_are_checksummed(node: NewNode) -> None:
    one = node("one")
    one.keep()
    one.commit(filled(1))
    one.until(lambda: [kept for kept in one.kept if kept["summed"]])
    assert [verify(one.path(held)) for held in one.held()] == [SnapshotVerdict.WHOLE] and one.sent() == []


def test_unreadable_snapshot_does_not_delay_others(node: NewNode) -> None:
    one, other = node("one"), node("other")
    other.keep()
    one.commit(filled(2, rank=1, world=2))
    (damaged,) = one.held()
    with one.path(damaged).open("r+b") as file:
        file.seek(damaged.record.own.at)
        file.write(b"?")
    one.commit(filled(1, rank=0, world=2))
    one.keep(other.address)
    one.until(lambda: one.sent() == [1])


def test_snapshots_faster_than_the_link_are_skipped(node: NewNode) -> None:
    one, other = node("one"), node("other")
    other.keep()
    with relay(other.address, forth=held_back(50_000, until=one.folder.parent / "go")) as slow:
        one.keep(slow)
        for step in range(1, 6):
            one.commit(filled(step, elements=40_000), slots=5)
            _wait_for_files(other.folder, 1)
        (one.folder.parent / "go").touch()
        one.until(lambda: 5 in one.sent())
    other.until(lambda: [copy for copy in other.kept if copy["step"] == 5])
    assert {copy["step"] for kept in other.all_kept for copy in kept} == {1, 5}
    assert len(os.listdir(other.folder)) == 2


def test_new_buddy_gets_the_newest_snapshot(node: NewNode) -> None:
    one, _other = pair(node)
    for step in (1, 2):
        one.commit(filled(step))
        one.until(lambda step=step: step in one.sent())  # type: ignore[misc]
    third = node("third")
    third.keep(generation=2)
    one.keep(third.address, generation=2, resumed=2)
    one.until(lambda: one.kept and one.sent() == [2] and third.copies())
    assert [copy.record.step for copy in third.copies()] == [2]


def test_restarted_keeper_reports_its_snapshots_and_sends_only_missing_ones(node: NewNode) -> None:
    one, other = pair(node)
    one.commit(filled(1))
    one.until(one.sent)
    (before,) = [other.path(copy).stat().st_mtime_ns for copy in other.copies()]
    for each in (one, other):
        each.kill()
        each.start()
    other.keep()
    other.until(lambda: other.kept)
    one.keep(other.address)
    one.until(one.sent)
    assert [other.path(copy).stat().st_mtime_ns for copy in other.copies()] == [before]


def test_byte_damaged_in_transit_is_detected_and_the_previous_copy_stays(node: NewNode) -> None:
    one, other = pair(node)
    one.commit(filled(1, elements=100_000))
    one.until(one.sent)
    with relay(other.address, forth=flip_at(500_000)) as spoiled:
        one.keep(spoiled)
        one.commit(filled(2, elements=100_000))
        one.until(lambda: [kept for kept in one.kept if kept["summed"] and kept["step"] == 2])
        _wait_for_files(other.folder, 2)
        time.sleep(0.2)  # time for a wrong copy to appear
        assert one.sent() == [1] or one.sent() == []
        assert [(copy.record.step, verify(other.path(copy))) for copy in other.copies()] == [(1, SnapshotVerdict.WHOLE)]
    one.keep(other.address)
    one.until(lambda: 2 in one.sent())


def _wait_for_files(folder: Path, count: int) -> None:
    eventually(lambda: len(os.listdir(folder)) == count, every_s=0.01)


def test_copies_that_are_not_safe_yet_are_not_overwritten(node: NewNode) -> None:
    one, other = pair(node)
    set_safe(other, 1, -1)
    set_safe(one, 1, -1)
    for step in (1, 2, 3):
        one.commit(filled(step), slots=4)
        one.until(lambda step=step: step in one.sent())  # type: ignore[misc]
    one.commit(filled(4), slots=4)
    time.sleep(0.3)
    one.listen()
    assert one.sent() == [1, 2, 3] == sorted(copy.record.step for copy in other.copies())
    set_safe(other, 1, 2)
    one.until(lambda: 4 in one.sent())
    assert sorted(copy.record.step for copy in other.copies()) == [2, 3, 4]


def test_waiting_rank_does_not_delay_another(node: NewNode) -> None:
    one, other = pair(node)
    set_safe(other, 1, -1)
    set_safe(one, 1, -1)
    for step in (1, 2, 3, 4):
        one.commit(filled(step, rank=0, world=2), slots=4)
        one.until(lambda step=step: step == 4 or step in one.sent())  # type: ignore[misc]
    one.commit(filled(4, rank=1, world=2), slots=4)
    one.until(lambda: [kept for kept in one.kept if kept["rank"] == 1 and kept["sent"]])


def test_replaced_generation_is_refused_and_its_agent_gets_the_reason(node: NewNode) -> None:
    one, other = node("one"), node("other")
    other.keep(generation=2)
    other.ready()
    one.keep(other.address, generation=1)
    one.commit(filled(1))
    one.until(lambda: [message for message in one.received if "replaced this generation" in message.get("trouble", "")])
    assert one.sent() == [] and other.copies() == []
    one.keep(other.address, generation=2, resumed=1)
    one.until(one.sent)


def test_drop_order_removes_copies(node: NewNode) -> None:
    one, other = pair(node)
    for rank in (0, 1):
        one.commit(filled(1, rank=rank, world=2))
    one.until(lambda: one.sent() == [1, 1])
    other.order({"drop": [{"rank": 0}]})
    other.until(lambda: [kept["rank"] for kept in other.kept] == [1])
    assert [copy.rank for copy in other.copies()] == [1] and len(os.listdir(other.folder)) == 1


def test_keeper_ends_with_its_agent(node: NewNode) -> None:
    one, other = pair(node, rate=1e5)  # at this rate, a copy takes more than a minute
    one.commit(filled(1, elements=2_000_000))
    _wait_for_files(other.folder, 1)
    began = time.monotonic()
    assert one.hang_up() == 0 and other.hang_up() == 0
    assert time.monotonic() - began < 30
    assert other.copies() == []
