"""A worker reports its progress at intervals, and all of it at the end."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dalsegno.train.progress import ProgressReporter, SaveCounts, WaitClock
from dalsegno.train.schedule import StepClock


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
    own = {"step": 1, "generation": 1, "rank": 5, "busy_s": 0.0}
    assert agent.received == [own, {**own, "over": True}]


class Ddp:
    """A fake of DDP that provides only its measurements, in nanoseconds."""

    def __init__(self, waited_ns: int | None) -> None:
        self.waited_ns = waited_ns

    def _get_ddp_logging_data(self) -> dict[str, object]:
        if self.waited_ns is None:
            raise RuntimeError("no measurement yet")
        return {"backward_comm_time": self.waited_ns + 5, "backward_compute_comm_overlap_time": 5}


class Compiled:
    def __init__(self, module: object) -> None:
        self._orig_mod = module


@pytest.mark.parametrize(
    ("objects", "figures", "busy_s"),
    [
        ([], {}, 0.5),
        ([Ddp(None)], {}, 0.5),
        ([Ddp(200_000_000)], {}, 0.3),
        ([object(), Compiled(Ddp(200_000_000))], {}, 0.3),
        ([Ddp(900_000_000)], {}, 0.005),
        ([Ddp(200_000_000)], {"busy_s": 0.1}, 0.1),
        ([Ddp(200_000_000)], {"busy_s": float("nan")}, 0.3),
        ([], {"busy_s": 7.0}, 0.5),
    ],
)
def test_time_that_a_rank_waits_for_others_is_not_its_own(
    objects: list[object], figures: dict[str, float], busy_s: float
) -> None:
    agent = Agent()
    reporter = ProgressReporter(agent, 1, 3, objects)  # type: ignore[arg-type]
    reporter.report(1, StepClock(0.0, mean_s=0.5), None, figures, SaveCounts())
    assert agent.received[0]["busy_s"] == pytest.approx(busy_s)


def test_model_that_a_framework_wrapped_later_is_measured_once() -> None:
    agent, model = Agent(), Ddp(200_000_000)
    reporter = ProgressReporter(agent, 1, 3)  # type: ignore[arg-type]
    for wrapped in (object(), model, Compiled(model)):
        reporter.watch(wrapped)
    reporter.report(1, StepClock(0.0, mean_s=0.5), None, {}, SaveCounts())
    assert agent.received[0]["busy_s"] == pytest.approx(0.3)


def test_time_in_a_frameworks_own_collective_is_waiting_time() -> None:
    times = iter([0.0, 0.3, 1.0, 1.1])
    clock, agent, training = WaitClock(lambda: next(times)), Agent(), [True]
    gather = clock.wrap(lambda value: value + 1, lambda: training[0])
    reporter = ProgressReporter(agent, 1, 3)  # type: ignore[arg-type]
    reporter.watch(clock)
    assert gather(1) == 2
    reporter.report(1, StepClock(0.0, mean_s=0.5), None, {}, SaveCounts())
    assert agent.received[-1]["busy_s"] == pytest.approx(0.2)
    gather(1)
    training[0] = False
    gather(1)  # an evaluation
    for step in (2, 3):
        reporter.report(step, StepClock(0.0, mean_s=0.5), None, {}, SaveCounts())
    reporter.report_end(3)
    assert agent.received[-1]["busy_s"] == pytest.approx(0.45), "0.1 s in two steps"


def test_tokens_and_samples_become_rates() -> None:
    agent = Agent()
    reporter = ProgressReporter(agent, 1, 0)  # type: ignore[arg-type]
    reporter.report(1, StepClock(0.0), None, {"samples": 4, "tokens": 4096}, SaveCounts())
    reporter._sent_at -= 2.0  # as if two seconds had passed
    reporter.report(2, StepClock(0.0), None, {"samples": 8, "tokens": 8192}, SaveCounts())
    assert "samples_per_s" not in agent.received[0]["progress"]
    found = agent.received[1]["progress"]
    assert (found["samples_per_s"], found["tokens_per_s"]) == (
        pytest.approx(4.0, rel=0.1),
        pytest.approx(4096, rel=0.1),
    )
    assert "tokens" not in found
