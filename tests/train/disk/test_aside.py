"""A fresh start sets the old checkpoints aside and loses none."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from dalsegno.train.disk.aside import set_aside
from dalsegno.train.disk.load import find_newest
from dalsegno.train.disk.names import step_name
from tests.train.disk.states import filled, names, save


def test_old_checkpoints_move_and_can_still_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for step in (10, 20):
        save(tmp_path, filled(step), step)
    aside = set_aside(tmp_path)
    assert aside and aside.name.startswith("before-") and names(tmp_path) == [aside.name, "notes.txt"]
    assert find_newest(tmp_path, pytest.fail) is None
    found = find_newest(aside, pytest.fail)
    assert found and found.step == 20 and (aside / "latest" / ".metadata").exists()
    found.close()


def test_twice_in_a_second_makes_two_folders(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, filled(step), step)
        set_aside(tmp_path)
    kept = [path.name for aside in tmp_path.glob("before-*") for path in aside.glob("step-*")]
    assert sorted(kept) == [step_name(10), step_name(20), step_name(30)]


def test_nothing_to_set_aside_makes_no_folder(tmp_path: Path) -> None:
    assert set_aside(tmp_path) is None and set_aside(tmp_path / "nowhere") is None and names(tmp_path) == []
