"""A worker reports its progress at intervals, and all of it at the end."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.progress import ProgressReporter
from dalsegno.train.schedule import StepClock
from dalsegno.train.snapshots import SaveCounts


class Agent:
    """A fake of an agent that records all messages."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    def send(self, message: Any) -> None:
        self.received.append(dict(message))


def test_last_step_and_last_save_are_reported_without_delay() -> None:
    agent, counted = Agent(), SaveCounts()
    reporter = ProgressReporter(agent, 3, 0)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        reporter.report(step, StepClock(0.0), torch.tensor(0.5 * step), {"samples": 4, "accuracy": 0.9}, counted)
    counted.saves, counted.save_s = 1, 2.5
    reporter.report_end(3)
    first, last = agent.received
    assert (first["step"], last["step"], last["over"], last["generation"]) == (1, 3, True, 3)
    assert {name: last["progress"][name] for name in ("loss", "accuracy", "saves", "save_s")} == {
        "loss": 1.5, "accuracy": 0.9, "saves": 1, "save_s": 2.5,
    }  # fmt: skip


def test_loss_is_kept_without_its_autograd_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    reporter = ProgressReporter(Agent(), 1, 0)  # type: ignore[arg-type]
    reporter.report(1, StepClock(0.0), (weight * 2).sum(), {}, SaveCounts())
    assert reporter._last is not None and not reporter._last[1]["loss"].requires_grad


def test_other_ranks_report_only_their_step() -> None:
    agent = Agent()
    reporter = ProgressReporter(agent, 1, 5)  # type: ignore[arg-type]
    reporter.report(1, StepClock(0.0), 0.5, {}, SaveCounts())
    reporter.report_end(1)
    assert agent.received == [{"step": 1, "generation": 1}, {"step": 1, "generation": 1, "over": True}]
