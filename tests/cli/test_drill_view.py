"""The messages of a drill about its training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from dalsegno.cli.health.drill import DrillView, now
from dalsegno.drill.impacts import TrainedStep
from dalsegno.runs.status import NodeRole, RunNodeStatus, RunPhase, RunStatus

NODES = (
    RunNodeStatus("n1", NodeRole.MEMBER),
    RunNodeStatus("n2", NodeRole.MEMBER),
    RunNodeStatus("n3", NodeRole.SPARE),
)


def status(phase: RunPhase = RunPhase.RUNNING, **what: Any) -> RunStatus:
    return RunStatus("drill-x", "drill", "ada", phase, 0.0, 9.0, nodes=NODES, **what)


def test_message_shows_step_loss_generation_and_nodes():
    assert now(None, status(RunPhase.WAITING)) == "the run is waiting"
    assert (
        now(TrainedStep(1.0, 40, 2.5, 1), status(generation=1)) == "step 40, loss 2.50, generation 1; trains on n1, n2"
    )


def test_last_step_of_an_earlier_generation_is_named_as_such():
    last = TrainedStep(1.0, 40, 2.5, 1)
    assert now(last, status(RunPhase.RESTARTING, generation=1)) == "step 40 was the last so far; the run is restarting"
    assert now(last, status(generation=2)) == "step 40 was the last so far; generation 2 begins on n1, n2"


def test_message_names_no_nodes_when_all_have_left():
    """All nodes have left at the end of the run. "trains on no node" would look like a fault."""
    left = replace(status(generation=1), nodes=(RunNodeStatus("n3", NodeRole.SPARE),))
    assert now(TrainedStep(1.0, 40, 2.5, 1), left) == "step 40, loss 2.50, generation 1"
    assert now(TrainedStep(1.0, 40, 2.5, 1), replace(left, generation=2)) == (
        "step 40 was the last so far; generation 2 begins"
    )


@dataclass
class Training:
    """The part of a training that `DrillView` uses."""

    step: TrainedStep | None = None

    def over(self) -> bool:
        return False

    def newest(self) -> TrainedStep | None:
        return self.step

    def status(self) -> RunStatus:
        return status(RunPhase.STARTING)


def test_unchanged_message_is_printed_once_without_a_terminal(capsys: pytest.CaptureFixture[str]):
    view, training = DrillView(every_s=0.0), Training()
    for _ in range(5):
        view.tell(training, [])  # type: ignore[arg-type]
    training.step = TrainedStep(1.0, 40, 2.5, 1)
    view.tell(training, [])  # type: ignore[arg-type]
    said = [line.partition(" s  ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["the run is starting", "step 40 was the last so far; the run is starting"]
