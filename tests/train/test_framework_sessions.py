"""The integrations of frameworks measure how long a rank waits for others.

`tests/cluster/test_frameworks.py` trains with the frameworks.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.huggingface import TrainerSession
from dalsegno.train.lightning import FitSession

WAITED_S, STEP_S = 0.2, 0.5


class WrappedModel:
    """A fake of DDP that provides only its measurements."""

    def _get_ddp_logging_data(self) -> dict[str, int]:
        return {"backward_comm_time": int(WAITED_S * 1e9), "backward_compute_comm_overlap_time": 0}


class PlayedAccelerator:
    def __init__(self) -> None:
        self.gathered: list[int] = []

    def gather(self, count: int) -> list[int]:
        self.gathered.append(count)
        return [count]


def busy_s(ckpt: Any) -> float:
    return float(ckpt._reporter._busy_s(STEP_S, None))


def test_trainer_session_measures_the_model_that_the_trainer_wraps(tmp_path: Path) -> None:
    accelerator = PlayedAccelerator()
    trainer = SimpleNamespace(
        model=torch.nn.Linear(2, 1), model_wrapped=WrappedModel(), optimizer=None, lr_scheduler=None,
        accelerator=accelerator, state=SimpleNamespace(max_steps=3),
    )  # fmt: skip
    session = TrainerSession(trainer, tmp_path / "ckpt", {})
    assert busy_s(session.ckpt) == STEP_S
    session.started()
    assert busy_s(session.ckpt) == pytest.approx(STEP_S - WAITED_S)
    assert accelerator.gather(7) == [7] and accelerator.gathered == [7]
    (clock,) = session.ckpt._reporter._clocks
    assert len(clock._pending) == 1, "the exchange of token counts is measured"
    session.close()
    assert "gather" not in vars(accelerator)


def test_fit_session_measures_the_model_that_lightning_wraps(tmp_path: Path) -> None:
    trainer = SimpleNamespace(
        world_size=1, optimizers=[], lightning_module=None, strategy=SimpleNamespace(model=WrappedModel())
    )
    session = FitSession(trainer, torch.nn.Linear(2, 1), tmp_path / "ckpt", {})
    assert busy_s(session.ckpt) == STEP_S
    session.started()
    assert busy_s(session.ckpt) == pytest.approx(STEP_S - WAITED_S)
    session.ckpt.end()
