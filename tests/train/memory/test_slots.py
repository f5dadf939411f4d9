"""The slots of a rank: what is kept and skipped, and their memory."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.errors import NotEnoughMemory
from dalsegno.train.memory.files import safe_name
from dalsegno.train.memory.free_memory import FreeMemory
from dalsegno.train.memory.safe_steps import SafeSteps, write_safe
from dalsegno.train.memory.slots import Slots, compute_needed_bytes
from dalsegno.train.memory.snapshot import hold_snapshot
from tests.train.memory.processes import in_child
from tests.train.memory.run_files import list_run_files
from tests.train.memory.states import filled


def steps(slots: Slots) -> list[int | None]:
    return [record.step if record else None for record in slots.records()]


def test_two_newest_steps_are_kept_without_replication(shm: Path) -> None:
    slots = Slots("a", rank=0, generation=1, folder=shm)
    for step in range(1, 6):
        assert slots.write(filled(step))
    assert steps(slots) == [5, 4] and slots.skipped == 0


def test_unsafe_step_is_not_overwritten_and_skips_are_counted(shm: Path) -> None:
    slots, safe = Slots("a", rank=0, generation=1, folder=shm), shm / safe_name("a")
    write_safe(safe, SafeSteps(1))
    assert [bool(slots.write(filled(step))) for step in (1, 2, 3)] == [True, True, False]
    assert steps(slots) == [1, 2] and slots.skipped == 1
    write_safe(safe, SafeSteps(1, (1, 2)))
    assert slots.write(filled(4)) and steps(slots) == [4, 2]


def test_new_generation_keeps_the_step_it_resumed_from(shm: Path) -> None:
    first = Slots("a", rank=0, generation=1, folder=shm)
    for step in (5, 6):
        first.write(filled(step))
    second = Slots("a", rank=0, generation=2, resumed=5, folder=shm)
    assert second.write(filled(6)) and [r and (r.generation, r.step) for r in second.records()] == [(1, 5), (2, 6)]


def test_snapshot_is_skipped_while_the_only_free_slot_is_read(shm: Path) -> None:
    slots = Slots("a", rank=0, generation=1, folder=shm)
    slots.write(filled(1))
    slots.write(filled(2))

    def try_to_write() -> None:
        mine = Slots("a", rank=0, generation=1, folder=shm)
        assert mine.write(filled(3)) is None and mine.skipped == 1

    with hold_snapshot(slots.slots[0].path):
        in_child(try_to_write)
    assert slots.write(filled(3)) and steps(slots) == [3, 2]


def test_memory_use_matches_the_estimate_from_the_start(shm: Path) -> None:
    state = filled(1, elements=100_000)
    slots = Slots("a", rank=0, generation=1, folder=shm)
    slots.prepare(state)
    used = sum((shm / name).stat().st_blocks * 512 for name in list_run_files("a", shm))
    assert used == compute_needed_bytes(state)
    for step in range(5):
        slots.write(filled(step, elements=100_000))
    assert sum((shm / name).stat().st_blocks * 512 for name in list_run_files("a", shm)) == used


def test_too_large_snapshot_is_refused_before_creation(shm: Path) -> None:
    tight = FreeMemory(shm=1 << 20, memory=8 << 30)
    slots = Slots("a", rank=0, generation=1, folder=shm, read_free_memory=lambda folder: tight)
    with pytest.raises(NotEnoughMemory, match="snapshots in memory need 3 MiB more"):
        slots.prepare(filled(1, elements=50_000))
    assert list_run_files("a", shm) == []


def test_existing_slots_need_no_more_memory(shm: Path) -> None:
    Slots("a", rank=0, generation=1, folder=shm).write(filled(1))
    none = FreeMemory(shm=0, memory=0)
    assert Slots("a", rank=0, generation=2, resumed=1, folder=shm, read_free_memory=lambda folder: none).write(
        filled(2)
    )


def test_slots_of_an_earlier_process_are_mapped_in_prepare(shm: Path) -> None:
    Slots("a", rank=0, generation=1, folder=shm).write(filled(1))
    slots = Slots("a", rank=0, generation=2, resumed=1, folder=shm)
    slots.prepare(filled(1))
    assert all(len(slot.buffer) == slot.capacity for slot in slots.slots) and steps(slots) == [1, None]
