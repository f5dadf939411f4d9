"""Every flipped bit of a slot is detected."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.memory.layout import lay_out
from dalsegno.train.memory.record import SUMS_AT, SnapshotSums
from dalsegno.train.memory.slots import Slot, begin, write
from dalsegno.train.memory.snapshot import (
    Incoming,
    SnapshotVerdict,
    checksum,
    open_snapshot,
    pack_part,
    state_of,
    verify,
)
from tests.train.memory.states import filled, same


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_checksummed_slot_is_intact(shm: Path) -> None:
    assert verify(shm / "s") == SnapshotVerdict.NOTHING
    write(Slot(shm / "s"), filled(1), generation=1)
    assert verify(shm / "s") == SnapshotVerdict.UNCHECKED
    assert checksum(shm / "s")
    assert verify(shm / "s") == SnapshotVerdict.WHOLE


def test_any_flipped_bit_is_detected(shm: Path) -> None:
    small = filled(1, count=4, elements=20)
    write(Slot(shm / "s"), small, generation=1)
    checksum(shm / "s")
    for bit in range(lay_out(small).total * 8):
        if bit % 7 == 0 or bit < 512 * 8:
            flip(shm / "s", bit)
            assert verify(shm / "s") in (SnapshotVerdict.DAMAGED, SnapshotVerdict.NOTHING), bit
            flip(shm / "s", bit)
    assert verify(shm / "s") == SnapshotVerdict.WHOLE


def test_flipped_bit_in_a_slot_of_many_chunks_is_detected(shm: Path) -> None:
    large = filled(1, count=3, elements=5 << 20)
    write(Slot(shm / "s"), large, generation=1)
    checksum(shm / "s")
    drawn = random.Random(4)
    for _ in range(8):
        bit = drawn.randrange(lay_out(large).total * 8)
        flip(shm / "s", bit)
        assert verify(shm / "s") in (SnapshotVerdict.DAMAGED, SnapshotVerdict.NOTHING), bit
        flip(shm / "s", bit)
    assert verify(shm / "s") == SnapshotVerdict.WHOLE


def test_checksums_of_the_previous_step_are_ignored(shm: Path) -> None:
    slot = Slot(shm / "s")
    write(slot, filled(1), generation=1)
    late = checksum(shm / "s")
    write(slot, filled(2), generation=1)
    assert late
    with (shm / "s").open("r+b") as file:
        file.seek(SUMS_AT)
        file.write(late.pack())
    assert verify(shm / "s") == SnapshotVerdict.UNCHECKED


def test_slot_being_written_is_not_checksummed(shm: Path) -> None:
    slot = Slot(shm / "s")
    write(slot, filled(1), generation=1)
    begin(slot, filled(2), generation=1)
    assert checksum(shm / "s") is None and verify(shm / "s") == SnapshotVerdict.NOTHING


def test_own_part_survives_the_copy_to_a_buddy(shm: Path) -> None:
    wanted = filled(5, rank=1, world=2)
    write(Slot(shm / "zero"), filled(5, rank=0, world=2), generation=1)
    write(Slot(shm / "one"), wanted, generation=1)
    receive(shm / "copy", *pack_part(taken(shm / "one")))
    assert verify(shm / "copy") == SnapshotVerdict.WHOLE
    assert same(state_of(taken(shm / "zero"), taken(shm / "copy")), wanted)


def test_copy_changed_in_transit_is_detected(shm: Path) -> None:
    write(Slot(shm / "one"), filled(5), generation=1)
    header, part = pack_part(taken(shm / "one"))
    changed = bytearray(part)
    changed[-100] ^= 1
    receive(shm / "copy", header, memoryview(changed))
    assert verify(shm / "copy") == SnapshotVerdict.DAMAGED


def test_partial_copy_is_an_empty_slot(shm: Path) -> None:
    write(Slot(shm / "one"), filled(5), generation=1)
    header, part = pack_part(taken(shm / "one"), SnapshotSums(0, 0, 0))
    coming = Incoming(shm / "copy", header)
    coming.buffer[:100] = part[:100]
    coming.abandon()
    assert verify(shm / "copy") == SnapshotVerdict.NOTHING


def taken(path: Path):  # type: ignore[no-untyped-def]
    snapshot = open_snapshot(path)
    assert snapshot
    return snapshot


def receive(path: Path, header: bytes, part: memoryview) -> None:
    coming = Incoming(path, header)
    coming.buffer[:] = part
    coming.commit()
