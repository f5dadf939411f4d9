"""What a worker tells of its progress: now and then, and at the end all of it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.progress import ProgressReporter
from dalsegno.train.schedule import StepClock
from dalsegno.train.snapshots import Counted


class Agent:
    """Hears everything."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def tell(self, message: Any) -> None:
        self.heard.append(dict(message))


def test_the_last_step_and_the_last_save_are_told_however_soon_they_follow() -> None:
    agent, counted = Agent(), Counted()
    teller = ProgressReporter(agent, 3, 0)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        teller.tell(step, StepClock(0.0), torch.tensor(0.5 * step), {"samples": 4, "accuracy": 0.9}, counted)
    counted.saves, counted.save_s = 1, 2.5
    teller.tell_end(3)
    first, last = agent.heard
    assert (first["step"], last["step"], last["over"], last["generation"]) == (1, 3, True, 3)
    assert {name: last["progress"][name] for name in ("loss", "accuracy", "saves", "save_s")} == {
        "loss": 1.5, "accuracy": 0.9, "saves": 1, "save_s": 2.5,
    }  # fmt: skip


def test_a_loss_is_kept_without_the_graph_it_came_from() -> None:
    weight = torch.ones(1, requires_grad=True)
    teller = ProgressReporter(Agent(), 1, 0)  # type: ignore[arg-type]
    teller.tell(1, StepClock(0.0), (weight * 2).sum(), {}, Counted())
    assert teller._last is not None and not teller._last[1]["loss"].requires_grad


def test_other_ranks_tell_their_step_alone() -> None:
    agent = Agent()
    teller = ProgressReporter(agent, 1, 5)  # type: ignore[arg-type]
    teller.tell(1, StepClock(0.0), 0.5, {}, Counted())
    teller.tell_end(1)
    assert agent.heard == [{"step": 1, "generation": 1}, {"step": 1, "generation": 1, "over": True}]
