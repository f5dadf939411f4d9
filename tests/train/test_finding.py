"""Ranks look for a checkpoint together: each reads a share, all take the same one, and all hear of what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.errors import CheckpointError
from dalsegno.train.ranks import StoreBoard
from dalsegno.train.resume import find_together
from tests.train.disk.states import filled, save

WORLD = 3


def found_by_all(folder: Path) -> tuple[list[Any], list[str]]:
    """For each rank the step it has found, or the error it got; and all that was said."""
    store, warned = torch.distributed.HashStore(), []
    seen: list[Any] = [None] * WORLD

    def look(rank: int) -> None:
        try:
            found = find_together(folder, StoreBoard(store, rank, WORLD), rank, WORLD, warned.append)
            seen[rank] = found and found.step
        except CheckpointError as error:
            seen[rank] = error.what

    threads = [threading.Thread(target=look, args=(rank,), daemon=True) for rank in range(WORLD)]
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


def test_all_take_the_newest(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, filled(step), step, world=2)
    assert found_by_all(tmp_path) == ([20, 20, 20], [])


def test_nothing_there_is_nothing_for_all(tmp_path: Path) -> None:
    assert found_by_all(tmp_path) == ([None] * 3, [])


@pytest.mark.parametrize("damage", [flip, append])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp", "MANIFEST.json"])
def test_damage_in_any_file_is_found_whoever_reads_it(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    for step in (10, 20):
        save(tmp_path, filled(step), step, world=2)
    damage(tmp_path / "step-000000000020" / name)
    seen, warned = found_by_all(tmp_path)
    assert seen == [10, 10, 10]
    assert len(warned) == 1 and name in warned[0], "the first rank speaks for all"


def test_all_ranks_hear_that_none_is_whole(tmp_path: Path) -> None:
    save(tmp_path, filled(10), 10, world=2)
    flip(tmp_path / "step-000000000010" / "__1_0.distcp")
    seen, _ = found_by_all(tmp_path)
    assert seen == [f"no checkpoint in {tmp_path} is whole: step-000000000010"] * 3
