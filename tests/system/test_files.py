"""Tests of atomic writes, locks and removal of trees."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from dalsegno.errors import DalsegnoError
from dalsegno.system.files import (
    closed_to_others,
    explain,
    locked,
    nameless,
    read_json,
    remove_tree,
    sync_folder,
    write_atomic,
    write_if_changed,
)


def test_file_is_written_with_the_requested_mode(tmp_path: Path):
    write_atomic(tmp_path / "secret", "x", 0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["secret"]


def test_full_disk_error_names_the_file_and_a_hint():
    error = explain(OSError(errno.ENOSPC, "No space left on device"), Path("/var/x"))
    assert error.what == "no space left to write /var/x" and "DALSEGNO_HOME" in error.hint


def test_unchanged_file_is_not_written(tmp_path: Path):
    assert write_if_changed(tmp_path / "a", "1")
    assert not write_if_changed(tmp_path / "a", "1")


def test_damaged_file_raises_an_error_with_a_hint(tmp_path: Path):
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(DalsegnoError) as caught:
        read_json(tmp_path / "state.json")
    assert "damaged" in caught.value.what and "down" in caught.value.hint
    assert read_json(tmp_path / "missing.json") is None


def test_second_holder_of_a_lock_gets_an_error(tmp_path: Path):
    with (
        locked(tmp_path / "lock", "cluster demo"),
        pytest.raises(DalsegnoError, match="another `dalsegno` is working on cluster demo"),
        locked(tmp_path / "lock", "cluster demo"),
    ):
        pass
    with locked(tmp_path / "lock", "cluster demo"):
        pass


def test_folders_without_permissions_are_removed(tmp_path: Path):
    (tmp_path / "tree/work/inner").mkdir(parents=True)
    (tmp_path / "tree/work/inner").chmod(0o000)
    (tmp_path / "tree/work").chmod(0o500)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


def test_removing_a_missing_tree_is_no_error(tmp_path: Path):
    remove_tree(tmp_path / "nothing")


# Durability


def disk_calls(work: Callable[[], object]) -> list[str]:
    """Return the calls that matter in a crash, in order, from the interpreter's audit events."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called in (os.fsync, os.replace):
            name = getattr(called, "__name__", "")
            seen.append(f"{name} of a folder" if frame.f_code is sync_folder.__code__ else name)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def test_durable_write_syncs_file_then_renames_then_syncs_folder(tmp_path: Path):
    whole = ["fsync", "replace", "fsync of a folder"]
    assert disk_calls(lambda: write_atomic(tmp_path / "a", "text")) == whole
    assert disk_calls(lambda: write_atomic(tmp_path / "a", "text", durable=False)) == ["replace"]

    def write_nameless() -> None:
        with nameless(tmp_path / "b") as handle:
            os.write(handle, b"text")

    assert disk_calls(write_nameless) == whole


def test_first_path_part_closed_to_others_is_found(tmp_path: Path) -> None:
    clone = tmp_path / "home/clone"
    clone.mkdir(parents=True)
    (clone / "file").write_text("")
    for path in (tmp_path, *tmp_path.parents[:2], tmp_path / "home", clone):
        path.chmod(path.stat().st_mode | 0o755)
    assert closed_to_others(clone, clone / "file") is None
    (clone / "file").chmod(0o600)
    assert closed_to_others(clone, clone / "file") == clone / "file"
    (tmp_path / "home").chmod(0o700)
    assert closed_to_others(clone) == tmp_path / "home"
    (tmp_path / "link").symlink_to(clone)
    assert closed_to_others(tmp_path / "link") == tmp_path / "home", "the target of a link counts too"
    (tmp_path / "home").chmod(0o711)
    assert closed_to_others(clone) is None, "it need not be listed"
