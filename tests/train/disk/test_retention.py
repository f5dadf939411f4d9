"""Retention keeps the last few checkpoints, every m-th, those being read, and all foreign files."""

from pathlib import Path

import pytest

from dalsegno.train.disk.folder import Retention, choose_removals, find_leftovers, find_namesakes, remove_namesakes
from dalsegno.train.disk.format import TemporaryName, step_name, trash_name
from tests.train.disk.states import filled, names, save, share_of, write_share


def test_last_k_checkpoints_stay() -> None:
    assert choose_removals([10, 20, 30, 40], newest=40, keep=Retention(2)) == [10, 20]
    assert choose_removals([10], newest=10, keep=Retention(3)) == []


def test_every_mth_step_is_never_removed() -> None:
    assert choose_removals(range(0, 100, 10), newest=90, keep=Retention(1, every=30)) == [10, 20, 40, 50, 70, 80]


def test_newest_verified_step_is_kept():
    """After data corruption, a run goes back to it."""
    assert choose_removals([10, 20, 30, 40], newest=40, keep=Retention(1, verified=25)) == [10, 30]
    assert choose_removals([10, 20, 30, 40], newest=40, keep=Retention(1, verified=5)) == [10, 20, 30]


def test_checkpoint_just_written_is_never_removed() -> None:
    assert choose_removals([10, 20], newest=20, keep=Retention(0)) == [10]


def test_later_steps_of_another_history_are_ignored() -> None:
    assert choose_removals([10, 20, 30, 40, 50], newest=30, keep=Retention(2)) == [10]


def test_leftovers_of_killed_savers_are_recognized_by_age() -> None:
    ours = TemporaryName(30, "run-a", 4)
    older = [TemporaryName(40, "run-a", 3), TemporaryName(20, "run-a", 4), TemporaryName(90, "run-b", 9)]
    living = [ours, TemporaryName(40, "run-a", 4), TemporaryName(10, "run-a", 5)]
    trash = trash_name(5, "ab")
    everything = [each.name for each in (*older, *living)] + [trash, "latest", step_name(10), ".step-mine.tmp", "notes"]
    assert find_leftovers(everything, ours) == sorted([*(each.name for each in older), trash])


def test_shares_of_an_earlier_start_with_the_same_name_are_removed(tmp_path: Path) -> None:
    """torchrun counts its restarts from 0 at each start: an old share must not be merged with a new one."""
    write_share(tmp_path, share_of(filled(1), 7, rank=1, world=2), "run-a", 0)
    write_share(tmp_path, share_of(filled(1), 7, rank=1, world=2), "run-b", 0)
    remove_namesakes(tmp_path, "run-a", generation=0)
    assert names(tmp_path) == [TemporaryName(7, "run-b", 0).name]


def test_older_generations_are_not_removed_as_namesakes() -> None:
    older, same, newer = (TemporaryName(7, "run-a", generation).name for generation in (2, 3, 4))
    assert find_namesakes([older, same, newer, "latest"], "run-a", generation=3) == [same, newer]


def test_commit_removes_old_checkpoints_and_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-5").mkdir()
    (tmp_path / step_name(1)).mkdir()
    (tmp_path / step_name(1) / "something.bin").write_text("not a checkpoint of ours, though it is named so")
    for step in (10, 20, 30, 40):
        save(tmp_path, filled(step), step, keep=2)
    assert names(tmp_path) == sorted(["latest", "notes.txt", "step-5", *map(step_name, (1, 30, 40))])


def test_checkpoint_being_read_is_not_removed(tmp_path: Path) -> None:
    from dalsegno.train.disk.load import find_newest

    save(tmp_path, filled(10), 10)
    found = find_newest(tmp_path, warn=pytest.fail)
    assert found
    save(tmp_path, filled(20), 20, keep=1)
    assert step_name(10) in names(tmp_path)
    found.close()
    save(tmp_path, filled(30), 30, keep=1)
    assert names(tmp_path) == ["latest", step_name(30)]


def test_later_commit_removes_leftovers_of_killed_processes(tmp_path: Path) -> None:
    for name in (TemporaryName(20, "run-a", 1).name, trash_name(5, "ab")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("half")
    save(tmp_path, filled(10), 10, generation=2)
    assert names(tmp_path) == ["latest", step_name(10)]
