"""A commit creates a complete checkpoint, or fails with a reason and leaves nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dalsegno.train.errors import CheckpointError
from tests.train.disk.states import commit, filled, names, save, share_of, write_share, yes

pytest.importorskip("torch")

from dalsegno.train.disk.format import TemporaryName, step_name
from dalsegno.train.disk.load import find_newest
from dalsegno.train.disk.verify import faults_of, read_manifest


def value_of(folder: Path) -> int:
    found = find_newest(folder, warn=pytest.fail)
    assert found
    with found:
        return int(found.value("epoch"))


def test_checkpoint_has_the_documented_files(tmp_path: Path) -> None:
    path = save(tmp_path, filled(7), 7, world=2)
    assert names(tmp_path) == ["latest", step_name(7)] and os.readlink(tmp_path / "latest") == step_name(7)
    assert names(path) == [".metadata", "MANIFEST.json", "__0_0.distcp", "__1_0.distcp"]
    manifest = read_manifest(path)
    assert (manifest.step, manifest.world, manifest.run, manifest.generation) == (7, 2, "run-a", 1)
    assert set(manifest.files) == {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_rank_0_waits_for_other_ranks(tmp_path: Path) -> None:
    write_share(tmp_path, share_of(filled(7), 7, rank=0, world=2), "run-a", 1)
    late = threading.Timer(0.1, write_share, (tmp_path, share_of(filled(7), 7, rank=1, world=2), "run-a", 1))
    late.start()
    assert commit(tmp_path, 7, 2, "run-a", 1, yes).name == step_name(7)
    late.join()


def test_latest_does_not_point_back_when_two_saves_of_a_generation_end_together(tmp_path: Path) -> None:
    for step, run in ((9, "run-b"), (8, "run-a"), (7, "run-a")):  # another run resumed before step 9
        write_share(tmp_path, share_of(filled(step), step, rank=0, world=1), run, 1)
        commit(tmp_path, step, 1, run, 1, yes)
    assert os.readlink(tmp_path / "latest") == step_name(8)


def test_missing_ranks_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    write_share(tmp_path, share_of(filled(7), 7, rank=0, world=3), "run-a", 1)
    with pytest.raises(CheckpointError, match="ranks 1, 2 did not write"):
        commit(tmp_path, 7, 3, "run-a", 1, yes, timeout_s=0.05)
    assert names(tmp_path) == []


def test_rank_0_stops_waiting_when_abandoned(tmp_path: Path) -> None:
    write_share(tmp_path, share_of(filled(7), 7, rank=0, world=2), "run-a", 1)
    with pytest.raises(CheckpointError, match="abandoned before rank 1"):
        commit(tmp_path, 7, 2, "run-a", 1, yes, abandoned=lambda missing: missing == [1])
    assert names(tmp_path) == []


def test_commit_does_not_wait_for_a_failed_rank(tmp_path: Path) -> None:
    write_share(tmp_path, share_of(filled(7), 7, rank=0, world=2), "run-a", 1)
    (tmp_path / TemporaryName(7, "run-a", 1).name / "__1_0.distcp").mkdir()  # rank 1 cannot overwrite it
    with pytest.raises(CheckpointError):
        write_share(tmp_path, share_of(filled(7), 7, rank=1, world=2), "run-a", 1)
    with pytest.raises(CheckpointError, match="rank 1 could not write its share: cannot write the checkpoint"):
        commit(tmp_path, 7, 2, "run-a", 1, yes)
    assert names(tmp_path) == []


def test_ended_generation_commits_nothing(tmp_path: Path) -> None:
    save(tmp_path, filled(5), 5)
    with pytest.raises(CheckpointError, match="generation 1 of run-a is over"):
        save(tmp_path, filled(7), 7, grant=lambda: False)
    assert names(tmp_path) == ["latest", step_name(5)]


def test_nothing_is_committed_without_permission(tmp_path: Path) -> None:
    def grant() -> bool:
        raise ConnectionRefusedError("no agent")

    with pytest.raises(
        CheckpointError, match="step 7 was not committed: no answer to the request for permission: no agent"
    ):
        save(tmp_path, filled(7), 7, grant=grant)
    assert names(tmp_path) == []


def test_permission_is_requested_before_the_rename(tmp_path: Path) -> None:
    seen: list[object] = []

    def grant() -> bool:
        temporary = tmp_path / TemporaryName(7, "run-a", 1).name
        seen.append((names(tmp_path), faults_of(temporary)))
        return True

    save(tmp_path, filled(7), 7, grant=grant)
    assert seen == [([TemporaryName(7, "run-a", 1).name], ())]


def test_intact_checkpoint_of_the_same_step_stays(tmp_path: Path) -> None:
    save(tmp_path, filled(1), 7)
    save(tmp_path, filled(2), 7, generation=2)
    assert value_of(tmp_path) == 1 and names(tmp_path) == ["latest", step_name(7)]


def test_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, filled(1), 7)
    (path / "__0_0.distcp").write_bytes(bytes(100))
    save(tmp_path, filled(2), 7, generation=2)
    assert value_of(tmp_path) == 2 and names(tmp_path) == ["latest", step_name(7)]


def test_users_own_file_named_latest_is_kept_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    warned: list[str] = []
    save(tmp_path, filled(7), 7, warn=warned.append)
    assert "does not point at the newest checkpoint" in warned[0] and (tmp_path / "latest" / "mine").exists()
    assert names(tmp_path) == ["latest", step_name(7)]


def test_share_written_twice_counts_once(tmp_path: Path) -> None:
    write_share(tmp_path, share_of(filled(1), 7), "run-a", 1)
    write_share(tmp_path, share_of(filled(2), 7), "run-a", 1)
    commit(tmp_path, 7, 1, "run-a", 1, yes)
    assert value_of(tmp_path) == 2


def test_file_times_are_ignored(tmp_path: Path) -> None:
    """A clock that jumps forward or back does not change which checkpoint is the newest or which is removed."""
    for step, then in ((10, 4e9), (20, 0), (30, 1e9)):
        path = save(tmp_path, filled(step), step, keep=2)
        for file in (path, *path.iterdir()):
            os.utime(file, (then, then))
    assert value_of(tmp_path) == 30
    assert names(tmp_path) == ["latest", step_name(20), step_name(30)]
