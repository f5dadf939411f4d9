"""Names in shared memory identify their run, and no run finds another's files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.train.errors import CheckpointError
from dalsegno.train.memory.files import (
    SlotName,
    alive_name,
    create_own,
    list_slots,
    parse_slot,
    remove_folder,
    safe_name,
    sweep,
)
from tests.train.memory.run_files import list_run_files

RUNS = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9.-]{0,30}\Z")
SLOTS = st.builds(SlotName, RUNS, st.integers(0, 9999), st.integers(0, 9), st.booleans())


@given(SLOTS)
def test_slot_name_survives_parsing(slot: SlotName) -> None:
    assert parse_slot(str(slot)) == slot


@given(SLOTS, SLOTS)
def test_slot_names_are_unique(one: SlotName, other: SlotName) -> None:
    assert (str(one) == str(other)) == (one == other)


def test_copy_has_a_different_name() -> None:
    assert str(SlotName("train-k3f9x", 3, 1)) == "train-k3f9x.3.1"
    assert str(SlotName("train-k3f9x", 3, 1, copy=True)) == "train-k3f9x.3.copy1"


@pytest.mark.parametrize("name", ["", "a.safe", "a.1", "a.1.alive", "a.x.1", "a b.1.1", "a"])
def test_other_file_names_are_not_slots(name: str) -> None:
    assert parse_slot(name) is None


@pytest.mark.parametrize("run", ["", "a/b", "../a", "a\n", "a b"])
def test_run_id_that_could_leave_the_folder_is_refused(run: str) -> None:
    with pytest.raises(CheckpointError, match="invalid run id"):
        SlotName(run, 0, 0)


def test_run_finds_and_sweeps_only_its_own_files(tmp_path: Path) -> None:
    mine = [str(SlotName("a", 0, 0)), str(SlotName("a", 2, 1, copy=True)), safe_name("a"), alive_name("a", 1)]
    others = [
        str(SlotName("a.0", 0, 0)), alive_name("b", 0), safe_name("a.b"), "dalsegno-x",
        str(SlotName("a.safe", 0, 0)),
    ]  # fmt: skip
    for name in mine + others:
        (tmp_path / name).touch()
    assert list_slots("a", tmp_path) == [SlotName("a", 0, 0), SlotName("a", 2, 1, copy=True)]
    assert list_run_files("a", tmp_path) == sorted(mine)
    assert sweep("a", tmp_path) == 4
    assert sorted(os.listdir(tmp_path)) == sorted(others)
    assert sweep("a", tmp_path) == 0


def test_missing_folder_has_no_slots(tmp_path: Path) -> None:
    assert list_slots("a", tmp_path / "none") == []


def test_file_is_created_while_other_runs_remove_the_empty_folder(tmp_path: Path) -> None:
    folder = tmp_path / "dalsegno.1"
    done = threading.Event()

    def remove_until_done() -> None:
        while not done.is_set():
            remove_folder(folder)

    remover = threading.Thread(target=remove_until_done)
    remover.start()
    try:
        for number in range(2000):
            os.close(create_own(folder / str(number)))
            (folder / str(number)).unlink()
    finally:
        done.set()
        remover.join()


def test_recreated_folder_is_private_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "dalsegno.1"
    os.close(create_own(folder / "a.0.0"))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError):
        create_own(folder / "a.0.1")
