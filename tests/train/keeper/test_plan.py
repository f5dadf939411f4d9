"""The next action of a keeper: newest first, ranks in turn, and nothing overwritten that may be needed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dalsegno.train.keeper.holdings import StoredSnapshot
from dalsegno.train.keeper.plan import (
    COPIES,
    OWN,
    SHARED,
    KeeperAddress,
    KeepOrder,
    choose_slot,
    choose_to_send,
    choose_to_sum,
    find_own,
    find_shared,
    find_unneeded,
    key_of,
)
from dalsegno.train.memory.files import SlotName
from dalsegno.train.memory.record import ABSENT, Extent, SnapshotRecord, free_slots
from dalsegno.train.memory.safe_steps import NOTHING_SAFE, NOWHERE, SafeSteps

PART = Extent(512, 64, 2, 0)
KEEP = KeepOrder("a", b"", "n1", generation=1, buddy=KeeperAddress("b", 1, "n2"))


def record(step: int, rank: int = 0, generation: int = 1) -> SnapshotRecord:
    return SnapshotRecord(generation * 1000 + step, step, generation, rank, 8, PART, PART)


def held(
    step: int, rank: int = 0, generation: int = 1, copy: bool = False, slot: int = 0, summed: bool = True
) -> StoredSnapshot:
    return StoredSnapshot(SlotName("a", rank, slot, copy), record(step, rank, generation), summed)


def sent(*these: StoredSnapshot) -> set[tuple[int, int]]:
    return {key_of(one) for one in these}


def test_newest_snapshot_of_this_node_is_checksummed_first() -> None:
    old, new, done, copy = held(1, summed=False), held(2, summed=False), held(3), held(4, copy=True, summed=False)
    assert choose_to_sum([old, new, done, copy]) == new
    assert choose_to_sum([old, done, copy]) == choose_to_sum([old, new], failed=sent(new)) == old
    assert choose_to_sum([done, copy]) is None


def test_newest_snapshot_is_sent_and_older_ones_are_skipped() -> None:
    first, second, third = (held(step) for step in (1, 2, 3))
    assert choose_to_send([first, second, third], KEEP, sent()) == third
    assert choose_to_send([first, second, third], KEEP, sent(third)) is None
    assert choose_to_send([first, second, third], KEEP, sent(first)) == third


def test_skipped_snapshot_is_sent_later_if_it_may_become_safe() -> None:
    snapshots = [held(step) for step in (1, 2, 3, 4)]
    assert choose_to_send(snapshots, KEEP, sent(snapshots[3]), SafeSteps(1, (1, 1)), skipped=True) == snapshots[2]
    assert choose_to_send(snapshots, KEEP, sent(snapshots[3]), SafeSteps(1, (1, 1))) is None
    assert choose_to_send(snapshots, KEEP, sent(*snapshots[2:]), SafeSteps(1, (1, 3)), skipped=True) is None


def test_ranks_are_served_in_turn() -> None:
    behind, ahead, newest = held(4, rank=1), held(4, rank=0), held(5, rank=0)
    assert choose_to_send([behind, ahead, newest], KEEP, sent()) == newest
    assert choose_to_send([behind, ahead, newest], KEEP, sent(ahead)) == behind
    assert choose_to_send([behind, ahead, newest], KEEP, sent(ahead, behind)) == newest


def test_copies_and_snapshots_without_checksums_are_not_sent() -> None:
    assert choose_to_send([held(1, copy=True), held(2, summed=False)], KEEP, sent()) is None


def test_abandoned_steps_are_not_sent() -> None:
    resumed, given_up = held(5, generation=1), held(6, generation=1)
    later = replace(KEEP, generation=2, resumed=5)
    assert choose_to_send([resumed, given_up], later, sent()) == resumed
    assert choose_to_send([resumed, given_up], replace(later, resumed=None), sent()) is None
    assert choose_to_send([resumed, given_up], replace(KEEP, generation=2), sent()) == given_up


def test_copy_is_written_beside_the_newest_without_a_third_file() -> None:
    assert choose_slot([None, None, None], [False, False, False], KEEP, None) == 0
    assert choose_slot([record(1), None, None], [True, False, False], KEEP, None) == 1
    assert choose_slot([record(1), record(2), None], [True, True, False], KEEP, None) == 0
    assert choose_slot([None, record(2), None], [True, True, False], KEEP, None) == 0


def test_copy_that_may_become_safe_is_not_overwritten() -> None:
    two = [record(1), record(2), None]
    assert choose_slot(two, [True, True, False], KEEP, SafeSteps(1, (1, 1))) == 2
    assert choose_slot([*two[:2], record(3)], [True] * 3, KEEP, SafeSteps(1, (1, 1))) is None
    assert choose_slot([*two[:2], record(3)], [True] * 3, KEEP, SafeSteps(1, (1, 2))) == 0
    assert choose_slot([*two[:2], record(3)], [True] * 3, KEEP, SafeSteps(1, (1, 1), floor=3)) == 1


def test_copy_of_the_resumed_step_stays_until_a_newer_step_is_safe() -> None:
    copies, later = [record(5), record(6), record(7, generation=2)], replace(KEEP, generation=2, resumed=5)
    assert choose_slot(copies, [True] * 3, later, SafeSteps(2, resumed=(1, 5))) == 1
    assert choose_slot(copies, [True] * 3, later, SafeSteps(2, (1, 6), resumed=(1, 5))) is None
    assert choose_slot(copies, [True] * 3, later, SafeSteps(2, (2, 7), resumed=(1, 5))) == 0
    assert choose_slot([record(5), None, None], [True, False, False], replace(later, resumed=None), None) == 0
    untold = replace(KEEP, generation=2)
    assert choose_slot([record(5), record(6), None], [True, True, False], untold, None) == 0


def test_local_snapshot_is_preferred_and_shared_parts_come_from_any_rank() -> None:
    here, copy, other = held(3, rank=1), held(3, rank=1, copy=True), held(3, rank=2)
    alone = replace(copy, record=replace(copy.record, shared=ABSENT))
    assert find_own([copy, here, other], 1, 1, 3) == here
    assert find_own([here], 1, 2, 3) is find_own([here], 1, 1, 4) is find_own([here], 0, 1, 3) is None
    assert find_shared([alone, other], 1, 3) == other
    assert find_shared([alone], 1, 3) is None


def test_fetched_parts_are_not_needed_when_a_newer_step_is_safe() -> None:
    own, shared, copy = (held(5, copy=True, slot=slot) for slot in (OWN, SHARED, 0))
    newer = [held(6, generation=2, copy=is_copy) for is_copy in (False, True)]
    assert find_unneeded([own, shared, copy, held(5), *newer], SafeSteps(2, (2, 6), resumed=(1, 5))) == [own, shared]
    assert (
        find_unneeded([own], SafeSteps(2, resumed=(1, 5)))
        == find_unneeded([own], NOTHING_SAFE)
        == find_unneeded([own], None)
        == []
    )


def test_files_of_a_moved_rank_are_removed_when_the_new_generation_has_a_safe_step() -> None:
    """The files are the rank's slots on its former node and the copies on a former buddy."""
    moved = [held(4, rank=1), held(5, rank=1, slot=1), held(4, rank=2, copy=True), held(5, rank=2, copy=True, slot=1)]
    lives = [held(4, rank=0), held(7, rank=0, generation=2, slot=1)]
    copied = [held(5, rank=3, copy=True), held(6, rank=3, generation=2, copy=True, slot=1)]
    every = [*moved, *lives, *copied]
    assert find_unneeded(every, None) == find_unneeded(every, NOTHING_SAFE) == []
    assert find_unneeded(every, SafeSteps(2, (1, 4), resumed=(1, 5))) == []
    assert find_unneeded(every, SafeSteps(2, (2, 6), resumed=(1, 5))) == moved


class Model:
    """A model of ranks on one node each, their buddies, and the safe step as the coordinator computes it."""

    def __init__(self, ranks: int, slots: int = 3) -> None:
        self.local: list[list[SnapshotRecord | None]] = [[None] * slots for _ in range(ranks)]
        self.copies: list[list[SnapshotRecord | None]] = [[None] * COPIES for _ in range(ranks)]
        self.sent: list[set[tuple[int, int]]] = [set() for _ in range(ranks)]
        self.safe = SafeSteps(1)

    def commit(self, rank: int, step: int) -> None:
        for slot in free_slots(self.local[rank], 1, None, self.safe)[:1]:
            self.local[rank][slot] = record(step, rank)

    def send(self, rank: int, skipped_too: bool) -> bool:
        """Send a snapshot and return whether one arrived."""
        mine = [StoredSnapshot(SlotName("a", rank, n), one, True) for n, one in enumerate(self.local[rank]) if one]
        one = choose_to_send(mine, KEEP, self.sent[rank], self.safe, skipped_too)
        slot = choose_slot(self.copies[rank], [True] * COPIES, KEEP, self.safe)
        if one is None or slot is None:
            return False
        self.copies[rank][slot] = one.record
        self.sent[rank].add(key_of(one))
        return True

    def find_safe(self) -> None:
        step = max(self.common(self.copies), default=-1)
        self.safe = SafeSteps(1, max(self.safe.place, (1, step) if step >= 0 else NOWHERE))

    @staticmethod
    def common(slots: list[list[SnapshotRecord | None]]) -> set[int]:
        return set.intersection(*({one.step for one in records if one} for records in slots))


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=120))
def test_nodes_do_not_deadlock_and_the_safe_step_is_always_present(ranks: int, events: list[tuple[int, int]]) -> None:
    model, steps = Model(ranks), [0] * ranks
    for rank, what in events:
        if what == 0:
            model.find_safe()
        elif what < 4:
            steps[rank % ranks] += 1 + (what == 3)  # only this rank may skip a step
            model.commit(rank % ranks, steps[rank % ranks])
        else:
            model.send(rank % ranks, skipped_too=what == 6)
        assert model.safe.place == NOWHERE or model.safe.place[1] in model.common(model.copies)
    moved = True
    while moved:
        model.find_safe()
        moved = any([model.send(rank, skipped_too=True) for rank in range(ranks)])
    assert model.safe.place[1] >= max(model.common(model.local), default=-1)
