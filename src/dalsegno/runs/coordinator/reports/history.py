"""The history of a run's loss and step time, for charts: at most 2,000 points, however long the run is."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dalsegno.errors import DalsegnoError
from dalsegno.runs.files import read_value
from dalsegno.runs.journal import MAX_TIME
from dalsegno.system.files import write_atomic

MAX_POINTS = 2000
FIRST_SPACING_S = 1.0
WRITE_S = 5.0
MAX_FIGURE = 1e100  # larger numbers are not drawn, because their differences may overflow


class StepPoint(NamedTuple):
    """The figures at one time. None means that the script does not report the figure."""

    at: float
    step: int
    generation: int
    loss: float | None
    step_s: float | None


def thinned(points: list[StepPoint]) -> list[StepPoint]:
    """Return every second point and the last one.

    Also keep the first point of each generation, where the curve may jump.
    """
    kept = [
        point
        for index, point in enumerate(points)
        if index % 2 == 0 or index == len(points) - 1 or point.generation != points[index - 1].generation
    ]
    return kept if len(kept) < len(points) else points[::2]


class HistoryWriter:
    """Collects the points of a run, and continues the file of a previous coordinator."""

    def __init__(self, path: Path) -> None:
        self._path, self._written_at = path, 0.0
        self.points = list(self._previous())
        self._changed = False

    def _previous(self) -> tuple[StepPoint, ...]:
        with contextlib.suppress(DalsegnoError, OSError):  # if the file is damaged, the history starts over
            value = read_value(self._path)
            return parse_history(value if isinstance(value, dict) else None)
        return ()

    @property
    def spacing_s(self) -> float:
        """The time between two points. A long run has fewer points per hour."""
        span = self.points[-1].at - self.points[0].at if len(self.points) > 1 else 0.0
        return max(FIRST_SPACING_S, span / MAX_POINTS)

    def record(self, at: float, step: int, generation: int, figures: Mapping[str, float | None]) -> None:
        """Record a reported step, unless its generation has a recent point already."""
        last = self.points[-1] if self.points else None
        if last and last.generation == generation and 0 <= at - last.at < self.spacing_s:
            return
        self.points.append(StepPoint(at, step, generation, figures.get("loss"), figures.get("step_s")))
        self._changed = True
        while len(self.points) > MAX_POINTS:
            self.points = thinned(self.points)

    def write(self, last: bool = False) -> None:
        """Write the file if there are new points, and either `last` is set or the last write is long enough ago."""
        if not self._changed or (time.monotonic() - self._written_at < WRITE_S and not last):
            return
        self._written_at, self._changed = time.monotonic(), False
        rows = [[round(point.at, 3), *point[1:]] for point in self.points]
        with contextlib.suppress(DalsegnoError, OSError):  # a full disk must not end the run
            write_atomic(self._path, json.dumps({"points": rows}), mode=0o644, durable=False)


def parse_history(value: Mapping[str, object] | None) -> tuple[StepPoint, ...]:
    """Parse the content of a history file, which users can edit. Invalid rows are skipped."""
    rows = value.get("points") if value else None
    if not isinstance(rows, list):
        return ()
    return tuple(point for row in rows[:MAX_POINTS] if (point := _point(row)) is not None)


def _point(row: object) -> StepPoint | None:
    if not isinstance(row, list) or len(row) != 5:
        return None
    at, step, generation, loss, step_s = row
    whole = type(step) is int and type(generation) is int
    if (
        not whole
        or not _is_number(at, MAX_TIME)
        or not all(each is None or _is_number(each) for each in (loss, step_s))
    ):
        return None
    loss, step_s = (None if each is None else float(each) for each in (loss, step_s))
    return StepPoint(float(at), step, generation, loss, step_s)


def _is_number(value: object, limit: float = MAX_FIGURE) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < limit
