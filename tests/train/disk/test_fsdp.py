"""Fully sharded models (FSDP2), in a real process group of two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp

from tests.train.disk.states import save

ROOT = Path(__file__).parents[3]


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_shards_are_loaded_on_another_number_of_ranks(tmp_path: Path) -> None:
    sharded, unsharded = tmp_path / "sharded", tmp_path / "unsharded"
    sharded.mkdir(), unsharded.mkdir()
    sizes = {"0.weight": (1101, 900), "0.bias": (1101,), "1.weight": (3, 1101), "1.bias": (3,)}
    save(unsharded, {"model": {key: torch.full(size, 9.0) for key, size in sizes.items()}}, 1, world=3)
    program = [sys.executable, "-m", "tests.train.disk.fsdp_pair"]
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*program, str(rank), str(sharded), str(unsharded)], env=env, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, output = rank.communicate(timeout=200)
        assert rank.returncode == 0, output.decode()[-2000:]
    state = {"model": {key: torch.zeros(size) for key, size in sizes.items()}}
    dcp.load(state, checkpoint_id=sharded / "latest")
    whole = torch.load(sharded / "whole.pt")
    assert all(torch.equal(state["model"][key], whole[key]) for key in sizes)
