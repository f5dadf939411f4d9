"""`dalsegno bench ddp` on real processes: with its own ranks, and as the ranks of another launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

# Real processes with torch: too slow for the unit part.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SOURCE = Path(__file__).parents[2] / "src"
SMALL = [
    "--model-mb",
    "0.5",
    "--layers",
    "3",
    "--batch",
    "4",
    "--steps",
    "2",
    "--bucket-cap-mb",
    "0.2",
    "--device",
    "cpu",
]
ROWS = ["alone", "gather", "per-parameter", "buckets", "overlap 0.2", "ring", "data-parallel", "ddp", "ddp 0.2"]


def bench(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dalsegno", "bench", "ddp", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SOURCE), **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Start two ranks as torchrun does, and return their exit codes and outputs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    folder = tmp_path_factory.mktemp("bench")
    ranks = [
        bench(*SMALL, "--json", "--timeline", "t.svg", cwd=folder, env={**world, "RANK": str(rank)}) for rank in (0, 1)
    ]
    answers = [rank.communicate(timeout=200) for rank in ranks]
    assert ElementTree.parse(folder / "t.svg").getroot().tag.endswith("svg")
    return [(rank.returncode, *answer) for rank, answer in zip(ranks, answers, strict=True)]


@pytest.fixture(scope="module")
def report(said: list[tuple[int, str, str]]) -> dict[str, Any]:
    code, out, err = said[0]
    assert code == 0, err
    return dict(json.loads(out))


def test_only_rank_0_prints(said: list[tuple[int, str, str]]):
    assert said[1][:2] == (0, "")


def test_json_has_step_times_and_traffic_of_every_rung(report: dict[str, Any]):
    assert (report["processes"], report["backend"], report["device"]) == (2, "gloo", "cpu")
    assert [each["name"] for each in report["rungs"]] == ROWS
    measured = [each for each in report["rungs"] if not each["why_not"]]
    assert {len(each["steps_s"]) for each in measured} == {len(each["traffic"]) for each in measured} == {2}
    assert all(each["times_ddp"] > 0 and each["marks"] for each in measured)


def test_data_parallel_without_gpus_has_a_reason_instead_of_times(report: dict[str, Any]):
    skipped = next(each for each in report["rungs"] if each["name"] == "data-parallel")
    assert "GPU" in skipped["why_not"]
    assert (skipped["median_s"], skipped["times_ddp"], skipped["steps_s"]) == (None, None, [])


def test_counted_and_computed_bytes_match_the_kernel(report: dict[str, Any]):
    """Torch's own DDP is checked too: gloo's all-reduce is a ring, so its bytes can be computed."""
    sent = {
        each["name"]: (rank["sent_bytes"], rank["tcp_bytes"]) for each in report["rungs"] for rank in each["traffic"]
    }
    if any(tcp is None for _, tcp in sent.values()):
        pytest.skip("this kernel does not count the bytes")
    framing = 20_000  # bytes of gloo's headers and of the barrier before each step
    assert {name: pair for name, pair in sent.items() if not 0 <= pair[1] - pair[0] < framing} == {}
    assert sent["ddp"][0] == report["gradient_bytes"]  # a ring sends 2(N-1)/N of the bytes: all, for N = 2


def test_overlap_sends_before_the_backward_pass_ends_and_buckets_after_it(report: dict[str, Any]):
    marks = {each["name"]: [mark for mark in each["marks"] if mark["rank"] == 0] for each in report["rungs"]}

    def at(rung: str, kind: str, which: str) -> float:
        return float(next(mark[which] for mark in marks[rung] if mark["kind"] == kind))

    assert at("overlap 0.2", "communicate", "begin_s") < at("overlap 0.2", "backward", "end_s")
    assert at("buckets", "communicate", "begin_s") >= at("buckets", "backward", "end_s")
