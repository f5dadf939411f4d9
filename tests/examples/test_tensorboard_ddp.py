"""examples/tensorboard_ddp.py: after a kill, the curves have every step once. It needs tensorboard and wandb."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.cluster]
pytest.importorskip("torch")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytest.importorskip("wandb")

SCRIPT = Path(__file__).parents[2] / "examples/tensorboard_ddp.py"


def test_curves_have_every_step_once_after_a_kill(tmp_path: Path) -> None:
    env = {**os.environ, "WANDB_SILENT": "true"}
    command = [sys.executable, str(SCRIPT), "300", str(tmp_path)]
    first = subprocess.Popen(command, env=env, cwd=tmp_path)
    eventually(lambda: (tmp_path / "checkpoints/latest").exists())
    first.send_signal(signal.SIGKILL)
    first.wait()
    subprocess.run(command, env=env, cwd=tmp_path, check=True)
    curves = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert [point.step for point in curves.Scalars("loss")] == list(range(300))
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 2
