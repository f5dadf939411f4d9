"""What a drill tells of its training while it trains."""

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


def test_it_tells_where_training_is():
    assert now(None, status(RunPhase.WAITING)) == "the run is waiting"
    assert (
        now(TrainedStep(1.0, 40, 2.5, 1), status(generation=1)) == "step 40, loss 2.50, generation 1; trains on n1, n2"
    )


def test_a_generation_that_has_no_step_yet_is_not_told_of_by_a_step_of_the_one_before():
    last = TrainedStep(1.0, 40, 2.5, 1)
    assert now(last, status(RunPhase.RESTARTING, generation=1)) == "step 40 was the last so far; the run is restarting"
    assert now(last, status(generation=2)) == "step 40 was the last so far; generation 2 begins on n1, n2"


def test_of_nodes_that_have_all_left_nothing_is_said():
    """At the end of the run; that it trains on none would be news of a fault."""
    left = replace(status(generation=1), nodes=(RunNodeStatus("n3", NodeRole.SPARE),))
    assert now(TrainedStep(1.0, 40, 2.5, 1), left) == "step 40, loss 2.50, generation 1"
    assert now(TrainedStep(1.0, 40, 2.5, 1), replace(left, generation=2)) == (
        "step 40 was the last so far; generation 2 begins"
    )


@dataclass
class Training:
    """As far as it is looked at."""

    step: TrainedStep | None = None

    def over(self) -> bool:
        return False

    def newest(self) -> TrainedStep | None:
        return self.step

    def status(self) -> RunStatus:
        return status(RunPhase.STARTING)


def test_where_no_line_is_drawn_anew_nothing_is_said_twice(capsys: pytest.CaptureFixture[str]):
    view, training = DrillView(every_s=0.0), Training()
    for _ in range(5):
        view.tell(training, [])  # type: ignore[arg-type]
    training.step = TrainedStep(1.0, 40, 2.5, 1)
    view.tell(training, [])  # type: ignore[arg-type]
    said = [line.partition(" s  ")[2] for line in capsys.readouterr().err.splitlines()]
    assert said == ["the run is starting", "step 40 was the last so far; the run is starting"]
