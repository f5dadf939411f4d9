"""Ranks find a checkpoint together: each reads a share, all use the same one, and all get the error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.errors import CheckpointError
from dalsegno.train.ranks import TorchRankStore
from dalsegno.train.resume import find_together
from tests.train.disk.states import filled, save

WORLD = 3


def found_by_all(folder: Path) -> tuple[list[Any], list[str]]:
    """Return the step or error of each rank, and all warnings."""
    store, warned = torch.distributed.HashStore(), []
    seen: list[Any] = [None] * WORLD

    def find(rank: int) -> None:
        try:
            found = find_together(folder, TorchRankStore(store, rank, WORLD), rank, WORLD, warned.append)
            seen[rank] = found and found.step
        except CheckpointError as error:
            seen[rank] = error.what

    threads = [threading.Thread(target=find, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return seen, warned


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"X")


def test_all_ranks_use_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, filled(step), step, world=2)
    assert found_by_all(tmp_path) == ([20, 20, 20], [])


def test_empty_folder_has_no_checkpoint_for_any_rank(tmp_path: Path) -> None:
    assert found_by_all(tmp_path) == ([None] * 3, [])


@pytest.mark.parametrize("damage", [flip, append])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp", "MANIFEST.json"])
def test_damage_in_any_file_is_detected_by_all_ranks(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    for step in (10, 20):
        save(tmp_path, filled(step), step, world=2)
    damage(tmp_path / "step-000000000020" / name)
    seen, warned = found_by_all(tmp_path)
    assert seen == [10, 10, 10]
    assert len(warned) == 1 and name in warned[0], "only the first rank warns"


def test_all_ranks_get_the_error_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    save(tmp_path, filled(10), 10, world=2)
    flip(tmp_path / "step-000000000010" / "__1_0.distcp")
    seen, _ = found_by_all(tmp_path)
    assert seen == [f"all checkpoints in {tmp_path} are damaged: step-000000000010"] * 3
