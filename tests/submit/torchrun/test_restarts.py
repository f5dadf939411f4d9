"""torchrun's rules for restarts."""

from __future__ import annotations

import pytest

from dalsegno.runs.coordinator.generations.events import (
    AgentJoined,
    Finish,
    GenerationStopped,
    Start,
    StoreOpened,
    WorkerEnded,
)
from dalsegno.runs.coordinator.generations.generations import Run, advance
from dalsegno.runs.coordinator.generations.group import Shape

SAME = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nValueError: same'


def rounds(run: Run, code: int, traceback: str = "") -> tuple[Run, list[object]]:
    """Run a generation of one node and two workers whose rank 1 ends with this code."""
    from dalsegno.runs.coordinator.generations.causes import read_failure

    run, _ = advance(run, StoreOpened("n", run.generation, 1))
    failure = read_failure(1, "n", code, traceback) if code else None
    run, _ = advance(run, WorkerEnded("n", run.generation, 1, code, failure, age_s=700.0))
    run, orders = advance(run, GenerationStopped("n", run.generation))
    return run, list(orders)


@pytest.mark.parametrize("code", [1, 75, 93, -9, -11])
def test_literal_rules_count_every_failure_without_pauses(code: int) -> None:
    trace = SAME if code == 1 else ""
    run, _ = advance(Run(Shape(1, 1, 2), max_restarts=3, literal=True), AgentJoined("n"))
    for restart in range(1, 4):
        run, orders = rounds(run, code, trace)
        assert (run.generation, run.restarts) == (restart + 1, restart)
        assert [type(each).__name__ for each in orders] == ["OpenStore"]
    run, orders = rounds(run, code, trace)
    assert isinstance(orders[-1], Finish) and orders[-1].code == (128 - code if code < 0 else code)
    assert not any(isinstance(each, Start) for each in orders)


def test_same_fault_twice_ends_our_own_runs() -> None:
    run, _ = advance(Run(Shape(1, 1, 2), max_restarts=3), AgentJoined("n"))
    run, _ = rounds(run, 1, SAME)
    run, orders = rounds(run, 1, SAME)
    assert isinstance(orders[-1], Finish) and "the same failure as before" in orders[-1].why
