"""A slot holds a complete step or nothing, keeps its memory between steps, and is read without a copy."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.layout import lay_out
from dalsegno.train.memory.record import HEADER, Extent, SnapshotRecord, SnapshotSums, parse_record, parse_sums
from dalsegno.train.memory.slots import Slot, begin, copy_now, write
from dalsegno.train.memory.snapshot import Incoming, hold_snapshot, open_snapshot, pack_part, read_record, state_of
from tests.train.memory.processes import in_child
from tests.train.memory.states import filled, piece, same, state

RECORD = SnapshotRecord(5, 7, 2, 1, 4, Extent(512, 128, 30, 99), Extent(640, 64, 20, 98))


def test_record_survives_parsing_and_any_flipped_bit_invalidates_it() -> None:
    raw = RECORD.pack().ljust(HEADER, b"\0")
    assert parse_record(raw) == RECORD
    for bit in range(256 * 8):
        torn = bytearray(raw)
        torn[bit // 8] ^= 1 << bit % 8
        assert parse_record(bytes(torn)) is None


@pytest.mark.parametrize("raw", [b"", bytes(HEADER), RECORD.pack()[:100], RECORD.pack()[:255]])
def test_torn_record_is_ignored(raw: bytes) -> None:
    assert parse_record(raw) is None


def test_checksums_have_their_own_record() -> None:
    assert parse_sums(RECORD.pack() + SnapshotSums(5, 1, 2).pack()) == SnapshotSums(5, 1, 2)
    assert parse_sums(RECORD.pack().ljust(HEADER, b"\0")) is None


def test_written_snapshot_is_read_by_a_later_reader(shm: Path) -> None:
    wanted = filled(3, rank=1, world=4)
    record = write(Slot(shm / "s"), wanted, generation=2)
    snapshot = open_snapshot(shm / "s")
    assert snapshot and snapshot.record == record
    assert (snapshot.record.step, snapshot.record.generation) == (3, 2)
    assert same(state_of(snapshot), wanted)


def test_file_is_accessible_only_to_its_owner(shm: Path) -> None:
    write(Slot(shm / "s"), filled(1), generation=1)
    assert (shm / "s").stat().st_mode & 0o777 == 0o600


def test_parameters_are_copied_without_autograd_history(shm: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    write(Slot(shm / "s"), state(1, piece("p", parameter)), generation=1)
    with torch.no_grad():
        parameter.add_(1)
    snapshot = open_snapshot(shm / "s")
    assert snapshot
    kept = state_of(snapshot).pieces[0].tensor
    assert kept.tolist() == [1, 1, 1] and not kept.requires_grad


def test_open_slot_is_empty_until_commit(shm: Path) -> None:
    slot = Slot(shm / "s")
    write(slot, filled(1), generation=1)
    draft = begin(slot, filled(2), generation=1)
    assert draft and read_record(shm / "s") is None and open_snapshot(shm / "s") is None
    copy_now(draft.pairs)
    assert open_snapshot(shm / "s") is None
    assert draft.commit() == read_record(shm / "s")


def test_file_is_reused_for_the_same_shape(shm: Path) -> None:
    slot = Slot(shm / "s")
    write(slot, filled(1), generation=1)
    before = (shm / "s").stat().st_ino
    write(slot, replace(filled(2), own=b"a little longer than before"), generation=1)
    assert (shm / "s").stat().st_ino == before


def test_warm_slot_is_written_without_page_faults(shm: Path) -> None:
    import resource

    slot, states = Slot(shm / "s"), [filled(step, count=4, elements=4 << 20) for step in range(3)]
    write(slot, states[0], generation=1)
    write(slot, states[1], generation=1)  # the threads and buffers of torch exist from this point on
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    write(slot, states[2], generation=1)
    pages = 4 * 4 * (4 << 20) // 4096
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages / 50


def test_larger_state_gets_a_larger_file(shm: Path) -> None:
    slot, grown = Slot(shm / "s"), filled(2, elements=100_000)
    write(slot, filled(1), generation=1)
    write(slot, grown, generation=1)
    snapshot = open_snapshot(shm / "s")
    assert snapshot and same(state_of(snapshot), grown)


def test_smaller_state_frees_memory(shm: Path) -> None:
    slot = Slot(shm / "s")
    write(slot, filled(1, elements=1_000_000), generation=1)
    write(slot, filled(2), generation=1)
    assert slot.capacity < 300_000


def test_later_process_takes_over_the_slot(shm: Path) -> None:
    in_child(lambda: write(Slot(shm / "s"), filled(1), generation=1))
    before, slot = (shm / "s").stat().st_ino, Slot(shm / "s")
    assert (record := slot.record()) and record.step == 1
    write(slot, filled(2), generation=2)
    assert (shm / "s").stat().st_ino == before and (record := slot.record()) and record.generation == 2


def test_changes_to_loaded_tensors_do_not_change_the_slot(shm: Path) -> None:
    write(Slot(shm / "s"), filled(1), generation=1)
    snapshot = open_snapshot(shm / "s")
    assert snapshot
    state_of(snapshot).pieces[0].tensor.fill_(9)
    again = open_snapshot(shm / "s")
    assert again and same(state_of(again), filled(1))


def test_slot_held_by_a_reader_is_not_overwritten(shm: Path) -> None:
    write(Slot(shm / "s"), filled(1), generation=1)
    with hold_snapshot(shm / "s") as snapshot:
        assert snapshot and snapshot.record.step == 1
        in_child(lambda: expect(write(Slot(shm / "s"), filled(2), generation=1) is None))
    in_child(lambda: expect(write(Slot(shm / "s"), filled(2), generation=1) is not None))
    assert not snapshot.still_there()


def test_truncated_file_counts_as_empty(shm: Path) -> None:
    write(Slot(shm / "s"), filled(1), generation=1)
    os.truncate(shm / "s", lay_out(filled(1)).total - 1)
    assert open_snapshot(shm / "s") is None


def test_lost_rank_is_restored_with_another_ranks_shared_part(shm: Path) -> None:
    write(Slot(shm / "zero"), filled(5, rank=0, world=2), generation=1)
    lost = filled(5, rank=1, world=2)
    write(Slot(shm / "lost"), lost, generation=1)
    whole = open_snapshot(shm / "lost")
    assert whole
    header, part = pack_part(whole)
    copy = Incoming(shm / "one", header)
    copy.buffer[:] = part
    copy.commit()
    zero, one = open_snapshot(shm / "zero"), open_snapshot(shm / "one")
    assert zero and one and same(state_of(zero, one), lost)
    assert len(one.mapping) < len(zero.mapping) + 1 and one.record.own.length < zero.record.end - 512
    with pytest.raises(CheckpointError, match="has no shared part"):
        state_of(one)


@pytest.mark.parametrize(("step", "generation"), [(5, 2), (6, 1)])
def test_parts_of_different_steps_or_generations_are_refused(shm: Path, step: int, generation: int) -> None:
    write(Slot(shm / "zero"), filled(5), generation=1)
    write(Slot(shm / "one"), filled(step), generation=generation)
    zero, one = open_snapshot(shm / "zero"), open_snapshot(shm / "one")
    assert zero and one
    with pytest.raises(CheckpointError, match="not of the same state"):
        state_of(zero, one)


def expect(true: bool) -> None:
    assert true
