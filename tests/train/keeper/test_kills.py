"""If a keeper is killed during a copy, committed copies are intact and acknowledged ones exist."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from dalsegno.train.memory import slots
from dalsegno.train.memory.slots import Slot
from dalsegno.train.memory.snapshot import SnapshotVerdict, open_snapshot, state_of, verify
from tests.train.keeper.conftest import NewNode
from tests.train.keeper.nodes import Node
from tests.train.memory.states import filled, same

ROUNDS = 250 if os.environ.get("DALSEGNO_LONG") else 24


def check_copies(node: Node, beside: Path, elements: int) -> list[int]:
    """Return the steps with a copy, after comparing each with what was sent, bit by bit."""
    for copy in node.copies():
        path, sent = node.path(copy), filled(copy.record.step, elements=elements)
        assert verify(path) == SnapshotVerdict.WHOLE
        slots.write(Slot(beside), sent, generation=copy.record.generation)
        shared, own = open_snapshot(beside), open_snapshot(path)
        assert shared and own and same(state_of(shared, own), sent)
    return [copy.record.step for copy in node.copies()]


@pytest.mark.cluster  # real processes: too slow for the unit part
@pytest.mark.timeout(600)
def test_sender_and_receiver_killed_at_random_moments_lose_no_acknowledged_copy(node: NewNode, shm: Path) -> None:
    drawn, elements = random.Random(), 60_000
    one, other = node("one"), node("other")
    step, newest, cut_short = 0, 0, 0
    for generation in range(1, ROUNDS + 1):
        other.keep(generation=generation)
        other.ready()
        one.keep(other.address, generation=generation, rate=drawn.choice([1e6, 4e6, 1e9]))
        until, before = time.monotonic() + 10, _touched(other)
        while time.monotonic() < until:
            step += 1
            one.commit(filled(step, elements=elements), slots=3)
            one.listen(drawn.uniform(0.001, 0.05))
            if _touched(other) != before:
                until = min(until, time.monotonic() + drawn.uniform(0, 0.05))
        acknowledged = max([newest, *one.sent()])
        victims = drawn.choice([[one], [other], [one, other]])
        for each in victims:
            each.kill()
        there = check_copies(other, shm / "beside", elements) if other in victims else _whole(other)
        assert max(there, default=0) >= acknowledged
        cut_short += len(os.listdir(other.folder)) > len(there)
        newest = max(there, default=0)
        for each in victims:
            each.start()
    assert newest > 0 and cut_short > 0
    other.kill()
    assert all(name.startswith("a.") for name in os.listdir(other.folder)) and len(os.listdir(other.folder)) <= 3


def _touched(node: Node) -> dict[str, int]:
    return {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(node.folder)}


def _whole(node: Node) -> list[int]:
    """Return the steps with a copy on a keeper that is running and may be writing."""
    return [copy.record.step for copy in node.copies()]


@pytest.mark.cluster  # many processes or connections: too slow for the unit part
@pytest.mark.timeout(600)
def test_fetch_survives_killed_holders(node: NewNode) -> None:
    """The fetch succeeds if one holder is alive."""
    drawn, state = random.Random(), filled(1, elements=400_000)
    one, other, third = node("one"), node("other"), node("third")
    one.keep()
    one.commit(state)
    for _ in range(ROUNDS // 6):
        for each in (other, third):
            each.keep()
        assert other.fetch(0, 1, own=[one.address], shared=[one.address])["ok"]
        addresses = [other.address, one.address]
        third.order(
            {"fetch": {"number": -1, "rank": 0, "generation": 1, "step": 1, "own": addresses, "shared": addresses}}
        )
        time.sleep(drawn.uniform(0, 0.01))
        other.kill()
        answer = third.until(lambda: next((one for one in third.received if one.get("fetched") == -1), None))
        shared, own = (open_snapshot(Path(answer[part])) for part in ("shared", "own"))
        assert answer["ok"] and shared and own and same(state_of(shared, own), state)
        third.received.clear()
        third.order({"drop": [{"rank": 0}]})
        third.until(lambda: third.kept == [])
        other.start()
