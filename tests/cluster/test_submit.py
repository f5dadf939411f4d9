"""Tests of submitting to a real Slurm: unchanged sbatch scripts, and the requests of runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import Cli
from tests.waiting import eventually

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --job-name=theirs
#SBATCH --output={output}
echo "$SLURM_JOB_NAME on $SLURM_JOB_NUM_NODES nodes: $*"
"""


@pytest.fixture
def folder(shared: Cli) -> Path:
    """Return a folder that the cluster's hosts see too."""
    folder = shared.home / "work"
    folder.mkdir(exist_ok=True)
    return folder


def test_sbatch_script_is_submitted_unchanged(shared: Cli, folder: Path) -> None:
    output = folder / "theirs.out"
    (folder / "theirs.sh").write_text(SCRIPT.format(output=output))
    said = shared.ok("submit", "theirs.sh", "--lr", "0.1", cwd=folder)
    assert said.startswith("Submitted batch job ") and said.split()[-1].isdigit()
    eventually(lambda: output.exists() and output.read_text() == "theirs on 2 nodes: --lr 0.1\n")


def test_refusal_by_slurm_is_reported(shared: Cli, folder: Path) -> None:
    (folder / "wrong.sh").write_text("#!/bin/sh\n#SBATCH --partition=nowhere\n")
    answer = shared.run("submit", "wrong.sh", cwd=folder)
    assert answer.code == 1
    assert "invalid partition specified: nowhere" in answer.err


def runs_in(cli: Cli) -> list[str]:
    """Return the runs in a home; other tests may have left some."""
    home = cli.home / "runs"
    return sorted(os.listdir(home)) if home.exists() else []


def test_dry_run_prints_commands_and_leaves_nothing(shared: Cli, folder: Path) -> None:
    (folder / "train.py").write_text("")
    words = ["-N", "2", "--spares", "1", "--gpus-per-node", "8", "-t", "3h", "--qos", "high"]
    before = runs_in(shared)
    answer = shared.run("run", "--dry-run", *words, "train.py", "--lr", "1", cwd=folder)
    assert answer.code == 0, answer.err
    for asked in (
        "--nodes=3",
        "--gpus-per-node=8",
        "--time=02:00:00",
        "--qos=high",
        f"--chdir={folder}",
        "run-agent",
    ):
        assert asked in answer.out
    assert "partition `train` limits jobs to 02:00:00; the run continues in further jobs" in answer.err
    assert runs_in(shared) == before


def test_job_file_is_equivalent_to_the_command_line(shared: Cli, folder: Path) -> None:
    (folder / "train.py").write_text("")
    (folder / "job.yaml").write_text("script: train.py\nnodes: 2\ngpus_per_node: 8\nname: mine\n")
    result = shared.ok("submit", "--dry-run", "job.yaml", cwd=folder)
    line = shared.ok("run", "--dry-run", "-N2", "--gpus-per-node=8", "-J", "mine", "train.py", cwd=folder)
    assert without_id(result) == without_id(line)


def without_id(text: str) -> str:
    """Remove the run's id, which is different each time."""
    ids = {word.partition("=")[2] for word in text.split() if word.startswith("--job-name=")}
    for run in ids:
        text = text.replace(run, "RUN")
    assert ids, text
    return text


def test_impossible_request_is_refused_before_anything_is_created(shared: Cli, folder: Path) -> None:
    (folder / "train.py").write_text("")
    before = runs_in(shared)
    for words, what in {
        ("-N", "9", "train.py"): "the run requests 9 nodes, but partition `train` has 3",
        ("-p", "trian", "train.py"): "there is no partition `trian`",
        ("gone.py",): "script `gone.py` not found",
    }.items():
        answer = shared.run("run", *words, cwd=folder)
        assert (answer.code, what in answer.err) == (2, True), answer.err
    assert runs_in(shared) == before


def test_slurm_of_the_shell_is_used_without_cluster_name(shared: Cli, folder: Path) -> None:
    """Only SLURM_CONF is set, as on a cluster without Dal Segno."""
    (folder / "train.py").write_text("")
    exported = json.loads(shared.ok("env", "--json"))
    elsewhere = Cli(folder, os.geteuid())
    nothing = elsewhere.run("run", "--dry-run", "train.py", cwd=folder)
    assert nothing.code == 1
    assert "there is no cluster yet" in nothing.err
    env = {**elsewhere.env, "SLURM_CONF": exported["SLURM_CONF"]}
    argv = elsewhere.argv("run", "--dry-run", "train.py")
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n"), "without our controller it is a batch job"
