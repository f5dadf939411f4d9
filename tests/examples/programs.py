"""Run the examples in tests and parse their output."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.submit.torchrun.launcher import Launcher, python_with_torch

EXAMPLES = Path(__file__).parents[2] / "examples"
FRAIL = Path(__file__).parent / "frail.py"
PAIR = ["--standalone", "--nproc-per-node", "2"]
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TINY_GPT = [
    str(EXAMPLES / "gpt.py"), "--layers", "2", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4",
    "--print-every", "1", "--sample", "20",
]  # fmt: skip


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Return a launcher whose `run` is `dalsegno torchrun` by default."""
    found = Launcher(tmp_path, python_with_torch(), {"OMP_NUM_THREADS": "1"})
    yield found
    found.close()


def losses(*runs: subprocess.CompletedProcess[str]) -> dict[int, set[str]]:
    """Return the losses printed for each step by all runs. One value per step means that the runs agree."""
    found: dict[int, set[str]] = {}
    for line in "".join(run.stdout for run in runs).splitlines():
        words = line.split()
        if "step" in words and "loss" in words:
            found.setdefault(int(words[words.index("step") + 1]), set()).add(words[-1])
    return found


def assert_well(run: subprocess.CompletedProcess[str]) -> None:
    assert run.returncode == 0, f"{run.stdout[-1000:]}\n{run.stderr[-3000:]}"
