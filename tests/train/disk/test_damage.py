"""Damage in any file is detected and costs one checkpoint, never the run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dalsegno.train.disk.format import step_name
from dalsegno.train.disk.load import find_newest, open_checkpoint
from dalsegno.train.disk.verify import faults_of
from dalsegno.train.errors import CheckpointError
from tests.train.disk.states import filled, save

FILES = [".metadata", "MANIFEST.json", "__0_0.distcp", "__1_0.distcp"]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Write two checkpoints and return the newer one."""
    save(tmp_path, filled(10), 10, world=2)
    return save(tmp_path, filled(20), 20, world=2)


def newest(folder: Path) -> tuple[int | None, list[str]]:
    warned: list[str] = []
    found = find_newest(folder, warned.append)
    if found:
        found.close()
    return (found.step if found else None), warned


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_detected_and_the_previous_checkpoint_is_used(two: Path, name: str) -> None:
    whole = (two / name).read_bytes()
    chance = random.Random(name)
    for place in {0, len(whole) - 1, *(chance.randrange(len(whole)) for _ in range(25))}:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << chance.randrange(8)
        (two / name).write_bytes(flipped)
        (fault,) = faults_of(two)
        assert fault.startswith(name)
        step, (warned,) = newest(two.parent)
        assert step == 10 and name in warned and two.name in warned
    (two / name).write_bytes(whole)
    assert newest(two.parent) == (20, [])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 1, -1])
def test_truncated_file_is_detected(two: Path, name: str, length: int) -> None:
    (two / name).write_bytes((two / name).read_bytes()[:length])
    assert newest(two.parent)[0] == 10


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_detected(two: Path, name: str) -> None:
    (two / name).unlink()
    step, (warned,) = newest(two.parent)
    assert step == 10 and f"{name} cannot be read: No such file" in warned


def test_too_long_file_is_detected(two: Path) -> None:
    with open(two / "__1_0.distcp", "ab") as file:
        file.write(b"x")
    assert "instead of" in newest(two.parent)[1][0]


def test_checkpoint_with_the_name_of_another_step_is_invalid(two: Path) -> None:
    two.rename(two.with_name(step_name(99)))
    assert newest(two.parent)[0] == 10


def test_copy_with_any_other_name_is_valid(two: Path) -> None:
    copy = two.rename(two.with_name("kept for the paper"))
    assert faults_of(copy) == ()
    open_checkpoint(copy).close()


def test_empty_folder_means_a_fresh_start(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, []) and newest(tmp_path / "nowhere") == (None, [])


def test_only_damaged_checkpoints_are_an_error(two: Path) -> None:
    for path in two.parent.glob("step-*"):
        (path / "MANIFEST.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged") as error:
        find_newest(two.parent, lambda text: None)
    assert "--fresh" in error.value.hint


def test_open_of_a_damaged_checkpoint_names_the_file(two: Path) -> None:
    (two / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 0 bytes"):
        open_checkpoint(two, every_byte=False)
