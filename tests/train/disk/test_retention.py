"""What goes and what stays: the last few, every m-th for ever, whatever is being read, and all that is not ours."""

from pathlib import Path

import pytest

from dalsegno.train.disk.folder import Retention, left_behind, namesakes, remove_namesakes, to_remove
from dalsegno.train.disk.format import TemporaryName, step_name, trash_name
from tests.train.disk.states import filled, names, save, share_of, write_share


def test_the_last_k_stay() -> None:
    assert to_remove([10, 20, 30, 40], newest=40, keep=Retention(2)) == [10, 20]
    assert to_remove([10], newest=10, keep=Retention(3)) == []


def test_every_mth_step_stays_for_ever() -> None:
    assert to_remove(range(0, 100, 10), newest=90, keep=Retention(1, every=30)) == [10, 20, 40, 50, 70, 80]


def test_the_one_just_written_stays_even_if_none_is_to_be_kept() -> None:
    assert to_remove([10, 20], newest=20, keep=Retention(0)) == [10]


def test_later_ones_are_of_another_history_and_count_for_nothing() -> None:
    assert to_remove([10, 20, 30, 40, 50], newest=30, keep=Retention(2)) == [10]


def test_what_killed_savers_left_is_known_by_its_age() -> None:
    ours = TemporaryName(30, "run-a", 4)
    older = [TemporaryName(40, "run-a", 3), TemporaryName(20, "run-a", 4), TemporaryName(90, "run-b", 9)]
    living = [ours, TemporaryName(40, "run-a", 4), TemporaryName(10, "run-a", 5)]
    trash = trash_name(5, "ab")
    everything = [each.name for each in (*older, *living)] + [trash, "latest", step_name(10), ".step-mine.tmp", "notes"]
    assert left_behind(everything, ours) == sorted([*(each.name for each in older), trash])


def test_shares_of_an_earlier_life_with_the_same_name_are_removed_before_the_first_save(tmp_path: Path) -> None:
    """torchrun counts its restarts from 0 each time it is called: rank 1's old share must not meet rank 0's new one."""
    write_share(tmp_path, share_of(filled(1), 7, rank=1, world=2), "run-a", 0)
    write_share(tmp_path, share_of(filled(1), 7, rank=1, world=2), "run-b", 0)
    remove_namesakes(tmp_path, "run-a", generation=0)
    assert names(tmp_path) == [TemporaryName(7, "run-b", 0).name]


def test_older_generations_are_no_namesakes_their_savers_may_be_at_work_still() -> None:
    older, same, newer = (TemporaryName(7, "run-a", generation).name for generation in (2, 3, 4))
    assert namesakes([older, same, newer, "latest"], "run-a", generation=3) == [same, newer]


def test_old_checkpoints_go_after_a_commit_and_foreign_things_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-5").mkdir()
    (tmp_path / step_name(1)).mkdir()
    (tmp_path / step_name(1) / "something.bin").write_text("not a checkpoint of ours, though it is named so")
    for step in (10, 20, 30, 40):
        save(tmp_path, filled(step), step, keep=2)
    assert names(tmp_path) == sorted(["latest", "notes.txt", "step-5", *map(step_name, (1, 30, 40))])


def test_one_that_is_being_read_stays_until_it_is_not(tmp_path: Path) -> None:
    from dalsegno.train.disk.load import find_newest

    save(tmp_path, filled(10), 10)
    found = find_newest(tmp_path, warn=pytest.fail)
    assert found
    save(tmp_path, filled(20), 20, keep=1)
    assert step_name(10) in names(tmp_path)
    found.close()
    save(tmp_path, filled(30), 30, keep=1)
    assert names(tmp_path) == ["latest", step_name(30)]


def test_a_later_commit_sweeps_what_a_killed_saver_and_a_killed_removal_left(tmp_path: Path) -> None:
    for name in (TemporaryName(20, "run-a", 1).name, trash_name(5, "ab")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("half")
    save(tmp_path, filled(10), 10, generation=2)
    assert names(tmp_path) == ["latest", step_name(10)]
