"""Tests of `runs show --plot`: loss and step time as text."""

from __future__ import annotations

from dalsegno.cli.training.runs import plot_history, plot_series
from dalsegno.runs.coordinator.reports.history import StepPoint


def test_values_are_drawn_between_their_extremes_over_the_steps() -> None:
    lines = list(plot_series("loss", [(0, 3.0), (10, 2.0), (20, 1.0)], [10], width=21, height=4))
    assert lines == [
        "loss",
        "         3 |*",
        "           |          *",
        "           |",
        "         1 |                    *",
        "           +----------^----------",
        "            step 0             20",
    ]


def test_repeated_step_counts_with_its_last_value() -> None:
    points = [StepPoint(0.0, 1, 1, 9.0, 0.1), StepPoint(1.0, 2, 1, 8.0, 0.1), StepPoint(2.0, 1, 2, 5.0, 0.2)]
    drawn = "\n".join(plot_history(points, 30))
    assert "         8 |" in drawn and "         5 |" in drawn and "9 |" not in drawn


def test_script_without_a_loss_gets_only_the_plot_of_step_times() -> None:
    points = [StepPoint(float(step), step, 1, None, 0.5) for step in range(5)]
    lines = list(plot_history(points, 30))
    assert [line for line in lines if line[:1].isalpha()] == ["step time (s)"]


def test_single_point_gives_no_plot() -> None:
    assert list(plot_history([StepPoint(0.0, 1, 1, 1.0, 0.5)], 30)) == []
