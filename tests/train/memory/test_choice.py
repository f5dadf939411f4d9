"""The choice of the slot to overwrite: never one that the run may have to resume from."""

from __future__ import annotations

from pathlib import Path

from dalsegno.train.memory.record import ABSENT, SnapshotRecord, free_slots
from dalsegno.train.memory.safe_steps import (
    NOTHING_SAFE,
    SafeSteps,
    parse_safe_steps,
    read_safe,
    render_safe_steps,
    write_safe,
)


def held(step: int, generation: int = 1) -> SnapshotRecord:
    return SnapshotRecord(0, step, generation, 0, 1, ABSENT, ABSENT)


def test_empty_slot_is_used_first() -> None:
    assert free_slots([held(5), None], generation=1) == [1]
    assert free_slots([None, None], generation=1) == [0, 1]


def test_older_slot_is_overwritten_without_replication() -> None:
    assert free_slots([held(5), held(6)], generation=1) == [0]
    assert free_slots([held(7), held(6)], generation=1) == [1]


def test_slot_is_free_only_when_a_newer_step_is_safe() -> None:
    slots = [held(5), held(6)]
    assert free_slots(slots, 1, safe=SafeSteps(1, (1, 4))) == []
    assert free_slots(slots, 1, safe=SafeSteps(1, (1, 5))) == []
    assert free_slots(slots, 1, safe=SafeSteps(1, (1, 6))) == [0]


def test_slots_older_than_the_safe_step_are_free_oldest_first() -> None:
    assert free_slots([held(6), held(5), held(7)], 1, safe=SafeSteps(1, (1, 7))) == [1, 0]


def test_resumed_step_stays_until_a_newer_one_is_safe() -> None:
    slots = [held(5, generation=1), held(6, generation=2)]
    assert free_slots([held(5, generation=1), None], 2, resumed=5) == [1]
    assert free_slots(slots, 2, resumed=5, safe=SafeSteps(2, resumed=(1, 5))) == []
    assert free_slots(slots, 2, resumed=5, safe=SafeSteps(2, (2, 6), resumed=(1, 5))) == [0]
    assert free_slots(slots, 2, resumed=5) == [0]


def test_safe_step_of_an_earlier_generation_frees_nothing_in_this_one() -> None:
    assert free_slots([held(5, 2), held(6, 2)], 2, resumed=4, safe=SafeSteps(1, (1, 9))) == []


def test_last_safe_step_stays_until_this_generation_has_one() -> None:
    """The resumed step may be on one node only."""
    slots = [held(5, 1), held(7, 1), held(8, 2)]
    assert free_slots(slots, 2, resumed=7, safe=SafeSteps(2, (1, 5), resumed=(1, 7))) == []
    assert free_slots(slots, 2, resumed=7, safe=SafeSteps(2, (1, 7), resumed=(1, 7))) == [0]
    assert free_slots(slots, 2, resumed=7, safe=SafeSteps(2, (2, 8), resumed=(1, 7))) == [0, 1]


def test_slots_between_the_safe_step_and_the_floor_are_free() -> None:
    slots = [held(5), held(7), held(9)]
    assert free_slots(slots, 1, safe=SafeSteps(1, (1, 5))) == []
    assert free_slots(slots, 1, safe=SafeSteps(1, (1, 5), floor=9)) == [1]
    assert free_slots(slots, 1, safe=SafeSteps(1, (1, 5), floor=20)) == [1, 2]


def test_abandoned_steps_are_free() -> None:
    assert free_slots([held(5, 1), held(9, 1)], 2, resumed=5) == [1]
    assert free_slots([held(8, 1), held(9, 1)], 2, resumed=3) == [0, 1]
    assert free_slots([held(8, 1), held(9, 1)], 2, resumed=None) == [0, 1]


def test_steps_before_the_resumed_one_are_free() -> None:
    assert free_slots([held(5, 1), held(4, 1)], 2, resumed=5, safe=SafeSteps(1, (1, 5))) == [1]


def test_safe_step_survives_write_and_read(tmp_path: Path) -> None:
    path = tmp_path / "dalsegno.0.a.safe"
    assert read_safe(path) is None
    for step in (3, 2**50):
        safe = SafeSteps(3, (2, step), resumed=(2, step + 1), floor=step + 9)
        write_safe(path, safe)
        assert read_safe(path) == safe == parse_safe_steps(render_safe_steps(safe))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


def test_damaged_safe_file_means_nothing_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "safe"
    write_safe(path, SafeSteps(1, (1, 3)))
    for raw in (b"", path.read_bytes()[:-1], b"\2" + path.read_bytes()[1:]):
        path.write_bytes(raw)
        assert read_safe(path) == NOTHING_SAFE
