"""A fresh start moves the old checkpoints aside and loses none."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from dalsegno.train.disk.folder import OpeningRun, open_folder, set_aside
from dalsegno.train.disk.format import step_name
from dalsegno.train.disk.load import find_newest
from tests.train.disk.states import filled, names, save


def test_old_checkpoints_are_moved_and_can_still_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for step in (10, 20):
        save(tmp_path, filled(step), step)
    aside = set_aside(tmp_path)
    assert aside and aside.name.startswith("before-") and names(tmp_path) == [aside.name, "notes.txt"]
    assert find_newest(tmp_path, pytest.fail) is None
    found = find_newest(aside, pytest.fail)
    assert found and found.step == 20 and (aside / "latest" / ".metadata").exists()
    found.close()


def test_two_fresh_starts_in_a_second_create_two_folders(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, filled(step), step)
        set_aside(tmp_path)
    kept = [path.name for aside in tmp_path.glob("before-*") for path in aside.glob("step-*")]
    assert sorted(kept) == [step_name(10), step_name(20), step_name(30)]


def test_no_folder_is_created_without_checkpoints(tmp_path: Path) -> None:
    assert set_aside(tmp_path) is None and set_aside(tmp_path / "nowhere") is None and names(tmp_path) == []


def test_checkpoints_of_the_run_and_damaged_ones_stay(tmp_path: Path) -> None:
    for step, run in ((10, "other"), (20, "ours"), (30, "ours.1"), (40, "ours.then"), (50, "ours")):
        save(tmp_path, filled(step), step, run=run, keep=9)
    (tmp_path / step_name(50) / "MANIFEST.json").write_text("damaged")
    aside = set_aside(tmp_path, except_run="ours")
    assert aside and names(aside) == [step_name(10), step_name(40)]
    assert names(tmp_path) == [aside.name, "latest", *map(step_name, (20, 30, 50))]


def test_latest_link_moves_with_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, filled(10), 10, run="ours")
    save(tmp_path, filled(20), 20, run="other")
    aside = set_aside(tmp_path, except_run="ours")
    assert aside and names(aside) == ["latest", step_name(20)] and names(tmp_path) == [aside.name, step_name(10)]


def fresh(folder: Path, run: str = "ours", named: bool = True, generation: int = 1, number: int = 0) -> list[int]:
    """Return which of the steps 10 (of another run) and 20 (of `ours`) remain after a fresh start."""
    save(folder, filled(10), 10, run="other")
    save(folder, filled(20), 20, run="ours")
    open_folder(folder, OpeningRun(run, named, generation, number, fresh=True), pytest.fail)
    return [int(name.rpartition("-")[2]) for name in names(folder) if name.startswith("step-")]


def test_first_generation_moves_all_checkpoints_aside(tmp_path: Path) -> None:
    assert fresh(tmp_path) == []


def test_later_generation_keeps_only_its_runs_checkpoints(tmp_path: Path) -> None:
    """The first generation may have died before this point, so --fresh still applies."""
    assert fresh(tmp_path, generation=2) == [20]


def test_second_checkpointer_keeps_checkpoints_of_the_first(tmp_path: Path) -> None:
    assert fresh(tmp_path, number=1) == [20]


def test_run_without_a_name_moves_nothing_aside_after_generation_1(tmp_path: Path) -> None:
    assert fresh(tmp_path, run="alone.7", named=False, generation=2) == [10, 20]
