"""What a drill tells of its training while it trains."""

from __future__ import annotations

from typing import Any

from dalsegno.cli.drill_view import now
from dalsegno.drill.story import Step
from dalsegno.launch.status import NodeStatus, Status

NODES = (NodeStatus("n1", "member"), NodeStatus("n2", "member"), NodeStatus("n3", "spare"))


def status(phase: str = "running", **what: Any) -> Status:
    return Status("drill-x", "drill", "ada", phase, 0.0, 9.0, nodes=NODES, **what)


def test_it_tells_where_training_is():
    assert now(None, status("waiting")) == "the run is waiting"
    assert now(Step(1.0, 40, 2.5, 1), status(generation=1)) == "step 40, loss 2.50, generation 1; trains on n1, n2"


def test_a_generation_that_has_no_step_yet_is_not_told_of_by_a_step_of_the_one_before():
    last = Step(1.0, 40, 2.5, 1)
    assert now(last, status("restarting", generation=1)) == "step 40 was the last so far; the run is restarting"
    assert now(last, status(generation=2)) == "step 40 was the last so far; generation 2 begins on n1, n2"
