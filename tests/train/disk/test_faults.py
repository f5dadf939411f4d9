"""A full, read-only or missing disk gives a clear error, leaves nothing partial and keeps earlier checkpoints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.disk.format import TemporaryName, step_name
from dalsegno.train.disk.load import find_newest
from dalsegno.train.errors import CheckpointError
from tests.train.disk.child import needs_root, on_a_small_disk
from tests.train.disk.states import commit, filled, names, save, share_of, write_share, yes

MIB = 1 << 20


@needs_root
def test_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    def work() -> None:
        save(tmp_path, filled(10), 10)
        with pytest.raises(CheckpointError, match="the disk is full") as error:
            save(tmp_path, {"model": {"weight": torch.ones(3 * MIB)}}, 20)
        assert "free some space" in error.value.hint
        assert names(tmp_path) == ["latest", step_name(10)]
        save(tmp_path, filled(30), 30)  # saving works again when there is space
        assert newest(tmp_path) == 30

    on_a_small_disk(tmp_path, "4m", work)


@needs_root
def test_full_disk_of_one_rank_is_reported_by_rank_0(tmp_path: Path) -> None:
    def work() -> None:
        state = {"model": {"weight": torch.ones(MIB + MIB // 2)}}
        write_share(tmp_path, share_of(state, 20, rank=0, world=2), "run-a", 1)
        (tmp_path / "others").write_bytes(bytes(MIB // 2))
        with pytest.raises(CheckpointError, match="the disk is full"):
            write_share(tmp_path, share_of(state, 20, rank=1, world=2), "run-a", 1)
        with pytest.raises(CheckpointError, match=r"rank 1 could not write its share: .* the disk is full"):
            commit(tmp_path, 20, 2, "run-a", 1, yes)
        assert names(tmp_path) == ["others"]

    on_a_small_disk(tmp_path, "6m", work)


@needs_root
def test_read_only_disk_is_reported(tmp_path: Path) -> None:
    def work() -> None:
        save(tmp_path, filled(10), 10)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(CheckpointError, match="the file system is read-only"):
            save(tmp_path, filled(20), 20)
        assert newest(tmp_path) == 10

    on_a_small_disk(tmp_path, "4m", work)


def test_missing_folder_is_not_created(tmp_path: Path) -> None:
    folder = tmp_path / "mount"
    with pytest.raises(CheckpointError, match="the folder no longer exists"):
        save(folder, filled(10), 10)
    assert not folder.exists()


def test_folder_removed_before_the_commit_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_share(folder, share_of(filled(7), 7), "run-a", 1)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="the folder no longer exists"):
        commit(folder, 7, 1, "run-a", 1, yes)


def test_truncated_data_file_is_detected_before_the_commit(tmp_path: Path) -> None:
    write_share(tmp_path, share_of(filled(7), 7), "run-a", 1)
    (tmp_path / TemporaryName(7, "run-a", 1).name / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 5 bytes"):
        commit(tmp_path, 7, 1, "run-a", 1, yes)
    assert names(tmp_path) == []


def newest(folder: Path) -> int:
    found = find_newest(folder, warn=pytest.fail)
    assert found
    with found:
        return found.step
