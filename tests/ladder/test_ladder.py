"""Every rung produces the gradients of torch's DDP, and its counts match what it sends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ladder.worlds import WORLDS

# Real processes with torch: too slow for the unit part.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
OURS = ["gather", "per-parameter", "buckets", "overlap", "ring"]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which three processes wrote their results for every rung, with three ranks and with two."""
    folder = tmp_path_factory.mktemp("ladder")
    path = os.pathsep.join(str(ROOT / part) for part in ("", "src", "examples"))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    argv = [sys.executable, "-m", "tests.ladder.ranks", str(folder)]
    ranks = [
        subprocess.Popen([*argv, str(rank), port], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(max(WORLDS))
    ]
    try:
        said = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0], "\n".join(said)
    (folder / "said").write_text(said[0])
    return folder


@pytest.fixture(params=WORLDS, ids=lambda size: f"{size} ranks")
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def found(folder: Path, size: int) -> Found:
    """The results, by rank."""
    seen = [json.loads((folder / f"found-{rank}.json").read_text())[str(size)] for rank in range(size)]
    return {what: [each[what] for each in seen] for what in seen[0]}


@pytest.mark.parametrize("rung", [*OURS, "ddp"])
def test_gradients_match_ddp_for_parameters_that_some_or_all_ranks_did_not_use(rung: str, found: Found, size: int):
    assert found[f"unused by all or some: {rung}"] == [[]] * size


@pytest.mark.parametrize("rung", [*OURS, "ddp", "data-parallel"])
def test_gradients_match_ddp_when_all_ranks_use_the_same_parameters(rung: str, found: Found, size: int):
    assert found[f"used by all: {rung}"] == [[]] * size


@pytest.mark.parametrize("rung", [*OURS, "ddp", "data-parallel"])
def test_all_ranks_start_with_the_weights_and_buffers_of_rank_0(rung: str, found: Found, size: int):
    start = found[f"start: {rung}"]
    assert start == [start[0]] * size


def test_without_find_unused_an_unused_parameter_counts_as_zero_and_no_rank_hangs(found: Found, size: int):
    assert found["zero instead of missing"] == [True] * size


def test_buckets_are_in_reverse_order_with_one_dtype_and_closed_at_the_cap(found: Found):
    # The order is reversed: second (60 B), sometimes' bias (80 B) and weight (180 B) | never (32 B), first's bias (52
    # B) and weight (192 B) | the double (24 B) | the scalar (4 B). The last two stay below the cap of 100 B, but their
    # dtypes do not share a bucket.
    assert found["buckets"][0] == [
        [3, 45, "torch.float32"],
        [4, 48, "torch.float32"],
        [1, 3, "torch.float64"],
        [1, 1, "torch.float32"],
    ]


# Traffic of a model with gradients of 48, 12, 24 and 8 bytes, in buckets of 44 and 48 bytes


def sums(found: Found, rung: str, field: str) -> list[int]:
    return [each[field] for each in found[f"traffic: {rung}"]]


def test_gather_makes_rank_0_send_and_receive_for_all(found: Found, size: int):
    others = size - 1
    assert sums(found, "gather", "messages") == [4 * others, *[4] * others]
    assert sums(found, "gather", "sent_bytes") == [92 * others, *[92] * others]
    assert sums(found, "gather", "received_bytes") == [92 * others, *[92] * others]
    assert sums(found, "gather", "computed") == [False] * size


def test_four_parameters_need_four_all_reduces_and_two_buckets_two(found: Found, size: int):
    assert sums(found, "per-parameter", "calls") == [4] * size
    for rung in ("buckets", "overlap", "ddp"):
        assert sums(found, rung, "calls") == [2] * size
        assert sums(found, rung, "messages") == [2 * 2 * (size - 1)] * size


def test_the_bytes_of_an_all_reduce_are_those_of_a_ring(found: Found, size: int):
    expected = {2: 44 + 48, 3: 44 * 4 // 3 + 48 * 4 // 3}[size]
    for rung in ("buckets", "overlap", "ddp"):
        assert sums(found, rung, "sent_bytes") == sums(found, rung, "received_bytes") == [expected] * size
        assert sums(found, rung, "computed") == [True] * size


def test_the_ring_sends_exactly_what_the_formula_says(found: Found, size: int):
    # 11 numbers on three ranks are chunks of 4, 4 and 3. A rank that sends the short chunk twice sends less.
    assert sums(found, "ring", "sent_bytes") == {2: [92, 92], 3: [124, 124, 120]}[size]
    assert sum(sums(found, "ring", "sent_bytes")) == 2 * (size - 1) * 92
    assert sums(found, "ring", "messages") == [2 * 2 * (size - 1)] * size
    assert sums(found, "ring", "computed") == [False] * size


def test_the_example_runs_as_a_program(folder: Path):
    said = (folder / "said").read_text()
    assert "ring: rank 0 in 3 steps: Tally(calls=" in said
    assert "largest difference to DDP's gradients: " in said
