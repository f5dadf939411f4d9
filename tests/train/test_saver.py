"""A save that takes longer than the save interval is still finished."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dalsegno.train.disk.write import write_share
from dalsegno.train.saver import Request, SaverTerms, finish
from tests.train.disk.states import filled, names, share_of


def request(folder: Path, step: int) -> Request:
    return Request(SaverTerms(str(folder), "run", 1, rank=0, world=2, keep=3), step, "")


def write(folder: Path, rank: int, step: int) -> None:
    write_share(folder, share_of(filled(step), step, rank, world=2), "run", 1)


def test_commit_waits_for_a_slow_rank_despite_a_newer_request(tmp_path: Path) -> None:
    write(tmp_path, 0, 10)
    slow = threading.Timer(0.2, write, (tmp_path, 1, 10))
    slow.start()
    assert finish(request(tmp_path, 10), pytest.fail, overtaken=lambda: True) == ""
    assert "step-000000000010" in names(tmp_path)
    slow.join()


def test_commit_does_not_wait_for_a_rank_that_writes_a_newer_step(tmp_path: Path) -> None:
    write(tmp_path, 0, 10)
    write(tmp_path, 1, 20)
    assert "abandoned before rank 1" in finish(request(tmp_path, 10), pytest.fail, overtaken=lambda: True)
    write(tmp_path, 0, 20)
    assert finish(request(tmp_path, 20), pytest.fail) == "", "the newer step is complete"
    assert names(tmp_path) == ["latest", "step-000000000020"]
