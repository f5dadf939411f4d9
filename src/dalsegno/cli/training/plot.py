"""Plots of a run's loss and step time as text for a terminal. Pure."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dalsegno.runs.coordinator.reports.history import StepPoint

MAX_WIDTH, HEIGHT = 100, 10
_LABEL = 10  # columns of the scale on the left
_CLIPPED = 0.995  # of the values are drawn to scale: one slow first step must not flatten the curve

Series = Sequence[tuple[int, float]]  # step and value


def plot_history(points: Sequence[StepPoint], width: int = 0) -> Iterator[str]:
    """Yield the lines of the plots. Of a step that was repeated after a restart, the last value counts."""
    width = width or min(MAX_WIDTH, shutil.get_terminal_size().columns) - _LABEL - 2
    starts = [after.step for before, after in pairwise(points) if after.generation > before.generation]
    loss = {point.step: point.loss for point in points if point.loss is not None}
    step_s = {point.step: point.step_s for point in points if point.step_s is not None}
    for name, values in (("loss", loss), ("step time (s)", step_s)):
        if len(values) > 1:
            yield from plot_series(name, sorted(values.items()), starts, max(width, 20))


def plot_series(name: str, series: Series, starts: Sequence[int], width: int, height: int = HEIGHT) -> Iterator[str]:
    """Yield the lines of one plot, with a mark at each column that has values. `^`: a generation started there."""
    first, last = series[0][0], series[-1][0]
    columns: dict[int, list[float]] = {}
    for step, value in series:
        columns.setdefault(_column(step, first, last, width), []).append(value)
    middles = {column: median(values) for column, values in columns.items()}
    ordered = sorted(middles.values())
    low, high = ordered[0], ordered[min(len(ordered) - 1, int(len(ordered) * _CLIPPED))]
    span = (high - low) or abs(high) or 1.0
    cells = [[" "] * width for _ in range(height)]
    for column, value in middles.items():
        cells[height - 1 - min(height - 1, round((value - low) / span * (height - 1)))][column] = "*"
    yield name
    for number, line in enumerate(cells):
        value = low + span * (height - 1 - number) / (height - 1)
        scale = f"{value:.4g}" if number % 3 == 0 else ""
        yield f"{scale:>{_LABEL}} |{''.join(line)}".rstrip()
    axis = ["-"] * width
    for start in starts:
        if first <= start <= last:
            axis[_column(start, first, last, width)] = "^"
    yield " " * (_LABEL + 1) + "+" + "".join(axis)
    left, right = f"step {first:,}", f"{last:,}"
    yield " " * (_LABEL + 2) + left + right.rjust(max(0, width - len(left)))


def _column(step: int, first: int, last: int, width: int) -> int:
    return round((step - first) / max(1, last - first) * (width - 1))
