"""Tests of `dalsegno certify` on real nodes. Parts that need torch are measured only in tests marked `long`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dalsegno.bench.certificate.certificate import CertifyPart, read_certificate
from tests.cluster.conftest import Cli, at_home, taken_down
from tests.cluster.test_containers import make_image
from tests.waiting import eventually

QUICK = ("certify", "--quick", "--cluster", "shared")


def test_the_parts_without_torch_are_measured_judged_and_compared(shared: Cli, tmp_path: Path):
    parts = ("--only", "health", "--only", "versions", "--only", "storage")
    first = shared.run(*QUICK, *parts, "--output", str(tmp_path / "first"))
    report = read_certificate((tmp_path / "first" / "certificate.json").read_text())
    levels = {each.part: each.word for each in report.parts}
    for part in (CertifyPart.VERSIONS, CertifyPart.STORAGE):
        assert levels[part] == "PASS", first.err
    # The node agents have run the checks on all nodes.
    assert levels[CertifyPart.HEALTH] not in ("not measured", "no verdict"), first.err
    assert levels[CertifyPart.PAIRS] == levels[CertifyPart.POWER_CUT] == "skipped"
    assert first.code == report.level.exit_code
    assert "virtual hosts" in first.err
    page = (tmp_path / "first" / "certificate.html").read_text()
    assert "dalsegno bench storage" in page and "train-3" in page
    old = str(tmp_path / "first" / "certificate.json")
    again = shared.run(*QUICK, "--only", "health", "--output", str(tmp_path / "b"), "--against", old, "--json")
    changed = {(each["part"], each["trend"]) for each in json.loads(again.out)["changes"]}
    assert {("versions", "no longer measured"), ("storage", "no longer measured")} <= changed


def test_a_power_cut_without_a_terminal_needs_yes_and_bad_input_measures_nothing(shared: Cli, tmp_path: Path):
    for words, said in (
        (("--power-cut",), "--yes"),
        (("--against", "/not/there"), "cannot be read"),
        (("--partition", "nowhere"), "there is no partition"),
    ):
        answer = shared.run(*QUICK, *words, "--output", str(tmp_path))
        assert (answer.code, said in answer.err) == (2, True), answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_all_parts_are_measured_with_torch(shared: Cli, tmp_path: Path):
    folder = shared.home / "certify-image"
    folder.mkdir()
    image = ("--container-image", str(make_image(folder)))
    answer = shared.run(*QUICK, *image, "--output", str(tmp_path), timeout_s=600)
    report = read_certificate((tmp_path / "certificate.json").read_text())
    outcomes = {each.part.value: (each.outcome.value, each.summary) for each in report.parts}
    for part in ("health", "versions", "storage", "pairs", "collectives", "gemm", "container"):
        assert outcomes[part][0] == "measured", (outcomes, answer.err)
    assert any("gloo" in line for line in report.simulated)
    assert (tmp_path / "certificate.html").read_text().count("<svg") == 2


@pytest.mark.long
def test_an_interrupted_certificate_leaves_no_job_behind(shared: Cli, tmp_path: Path):
    process = shared.start("certify", "--cluster", "shared", "--only", "gemm", "--output", str(tmp_path))
    jobs = ("shell", "-M", "shared", "--", "squeue", "-h", "-o", "%j")
    eventually(lambda: "bench-gemm" in shared.ok(*jobs), timeout_s=60)
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    eventually(lambda: "bench-gemm" not in shared.ok(*jobs), timeout_s=30)


THREE = """
name: one
target: local
partitions: [{name: train, nodes: 3, cpus: 4, memory: 2G, default: true}]
slurm: {accounting: false}
"""


@pytest.mark.long
def test_a_power_cut_is_survived_but_not_made_while_there_are_jobs(cache: Path, tmp_path: Path):
    cut = ("certify", "--only", "power-cut", "--power-cut", "--yes", "--output", str(tmp_path))
    with taken_down(at_home(cache)) as cli:
        cli.ok("up", cli.file(THREE))
        job = cli.ok("shell", "--", "sbatch", "--parsable", "--chdir=/", "--wrap", "sleep 300").strip()
        refused = cli.run(*cut)
        assert (refused.code, "there are jobs on the cluster" in refused.out) == (5, True), refused.err
        cli.ok("shell", "--", "scancel", job)
        eventually(lambda: not cli.ok("shell", "--", "squeue", "-h"))
        answer = cli.run(*cut, timeout_s=300)
        assert answer.code == 0, answer.out + answer.err
        assert "the power of train-" in answer.out
        assert (tmp_path / "power-cut.html").exists()
