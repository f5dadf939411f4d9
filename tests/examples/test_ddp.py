"""examples/ddp.py: alone, under torchrun, killed and resumed with the same loss curve."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.examples.programs import ALONE, EXAMPLES, FRAIL, PAIR, TORCHRUN, assert_well, launcher, losses
from tests.submit.torchrun.launcher import Launcher

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]  # several processes, each with torch

DDP = str(EXAMPLES / "ddp.py")
__all__ = ["launcher"]


def test_second_start_after_the_last_epoch_does_nothing(launcher: Launcher) -> None:
    line = [DDP, "2", "1", "--batch-size", "128"]
    first, second = (launcher.run(*line, program=ALONE) for _ in range(2))
    assert_well(first), assert_well(second)
    assert list(losses(first)) == list(range(2 * 2048 // 128)) and losses(second) == {}
    assert "resuming from step 32 (disk)" in second.stderr
    assert os.readlink(launcher.folder / "checkpoints/ddp/latest") == "step-000000000032"


@pytest.mark.long
def test_additional_epochs_continue_the_same_loss_curve(launcher: Launcher) -> None:
    at_once = launcher.run(DDP, "3", "1", "--checkpoints", "once", program=ALONE)
    parts = [launcher.run(DDP, epochs, "1", "--checkpoints", "parts", program=ALONE) for epochs in ("1", "3")]
    assert losses(*parts) == losses(at_once)


@pytest.mark.long
@pytest.mark.parametrize("killed_at", ["1", "70"])
def test_killed_worker_does_not_change_the_loss_curve(launcher: Launcher, killed_at: str) -> None:
    words = [DDP, "4", "2", "--checkpoints"]
    undisturbed = launcher.run(*PAIR, *words, "undisturbed")
    killed = launcher.run(*PAIR, "--max-restarts", "1", str(FRAIL), "SIGKILL", "1", killed_at, *words, "killed")
    assert_well(undisturbed), assert_well(killed)
    assert list(losses(undisturbed)) == list(range(4 * 1024 // 32))
    assert losses(killed) == losses(undisturbed)
    assert launcher.left() == []


@pytest.mark.long
def test_restarted_plain_torchrun_resumes_from_disk(launcher: Launcher) -> None:
    words = [DDP, "3", "1", "--checkpoints"]
    undisturbed = launcher.run(*PAIR, *words, "undisturbed", program=TORCHRUN)
    killed = launcher.run(*PAIR, str(FRAIL), "SIGKILL", "1", "90", *words, "killed", program=TORCHRUN)
    again = launcher.run(*PAIR, *words, "killed", program=TORCHRUN)
    assert_well(undisturbed), assert_well(again)
    assert killed.returncode == 1 and "saving to disk only" in killed.stderr
    assert losses(killed, again) == losses(undisturbed)


def test_sbatch_script_is_valid_and_runs_the_example() -> None:
    script = EXAMPLES / "ddp.sbatch"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    text = script.read_text()
    asked = re.findall(r"^#SBATCH (--[\w-]+)", text, re.MULTILINE)
    assert text.startswith("#!/bin/bash\n") and {"--nodes", "--ntasks-per-node", "--signal"} <= set(asked)
    assert "\nsrun torchrun \\\n" in text and "\n# srun dalsegno torchrun \\\n" in text and "examples/ddp.py" in text
