"""Tests of the examples on a cluster: ddp.sbatch with and without Dal Segno's launcher, and `dalsegno run`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import SOURCE, Cli
from tests.examples.programs import EXAMPLES, TINY_GPT
from tests.submit.torchrun.launcher import python_with_torch
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)
PLAIN, OURS = "\nsrun torchrun ", f"\nsrun {sys.executable} -m dalsegno torchrun "


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(PLAIN, id="torchrun"), pytest.param(OURS, id="dalsegno torchrun")],
)
@pytest.mark.long  # test_torchrun.py runs such a script, and tests/examples/test_ddp.py runs this program
def test_two_nodes_train_and_save(shared: Cli, launcher: str) -> None:
    folder = shared.home / f"ddp-{len(launcher)}"
    folder.mkdir()
    python = Path(python_with_torch())
    settings = f"export PATH={python.parent}:$PATH PYTHONPATH={SOURCE} NPROC=1 EPOCHS=2 DDP={EXAMPLES}/ddp.py"
    script = (EXAMPLES / "ddp.sbatch").read_text().replace(PLAIN, launcher).replace("\nNPROC=", f"\n{settings}\nNPROC=")
    (folder / "ddp.sbatch").write_text(script)
    job = shared.ok("submit", "ddp.sbatch", cwd=folder).split()[-1]
    output = folder / f"slurm-{job}.out"
    latest = folder / "checkpoints/ddp/latest"
    eventually(lambda: latest.is_symlink() and os.readlink(latest) == "step-000000000064", 200)
    assert "epoch 1 step 63 loss" in output.read_text()
    eventually(lambda: shared.ok("shell", "--", "squeue", "-h", "-j", job, "-t", "all", "-o", "%T") == "COMPLETED\n")


@pytest.mark.parametrize("script", [pytest.param("ddp.py", marks=pytest.mark.long), "gpt.py"])
def test_dalsegno_run_trains_the_examples_on_two_nodes(shared: Cli, script: str) -> None:
    folder = shared.home / script
    words = ["2", "1"] if script == "ddp.py" else [*TINY_GPT[1:], "--fsdp", "--steps", "20"]
    said = shared.ok("run", "--nodes", "2", str(EXAMPLES / script), *words, "--checkpoints", str(folder))
    assert f"step {63 if script == 'ddp.py' else 19} loss" in said
    assert os.readlink(folder / "latest") == f"step-0000000000{64 if script == 'ddp.py' else 20}"
