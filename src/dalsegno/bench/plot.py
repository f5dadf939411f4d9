"""Plot bus bandwidth over message size: as text for a terminal, and as a picture for SVG and PNG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from dalsegno.bench.nccl.table import NcclTable
from dalsegno.bench.nccl.verdict import BenchVerdict, size_text
from dalsegno.bench.picture import BLACK, GREY, Box, Label, Picture, Stroke

_MARKS = "*o+x#@%&"
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 420, 70, 20, 36, 60
_MOST_CURVES = len(_MARKS)


@dataclass(frozen=True)
class Curve:
    """The bandwidths of one table: points of message size and bus bandwidth, in ascending order of size."""

    name: str
    points: tuple[tuple[int, float], ...]
    expected: float | None = None


def make_curve(table: NcclTable, verdict: BenchVerdict) -> Curve:
    """Return the curve of a table. Of each row, the slower placement counts; of each size, the best row."""
    best: dict[int, float] = {}
    for row in table.rows:
        if row.size > 0:
            best[row.size] = max(row.busbw, best.get(row.size, 0.0))
    expected = verdict.expected.busbw if verdict.expected else None
    return Curve(f"{table.test.value}, {verdict.machines}", tuple(sorted(best.items())), expected)


def draw_text(curves: Sequence[Curve], width: int = 64, height: int = 11) -> str:
    """Return the plot as lines of ASCII; "" if no curve has two sizes: one point shows no more than the table."""
    curves = _plotted(curves)
    if all(len(each.points) < 2 for each in curves):
        return ""
    low, high, top = _scales(curves)
    cells = [[" "] * width for _ in range(height)]
    for expected in {each.expected for each in curves if each.expected}:
        row = height - 1 - min(height - 1, round(expected / top * (height - 1)))
        cells[row] = ["-"] * width
    for mark, curve in zip(_MARKS, curves, strict=False):
        for size, busbw in curve.points:
            column = round((log2(size) - low) / (high - low) * (width - 1))
            cells[height - 1 - round(busbw / top * (height - 1))][column] = mark
    steps = height - 1
    lines = [f"{top * (steps - row) / steps:7g} |{''.join(line).rstrip()}" for row, line in enumerate(cells)]
    first, last = size_text(2 ** round(low)), size_text(2 ** round(high))
    scale = " " * 9 + first + last.rjust(width - len(first))
    names = [f"{mark} {curve.name}" for mark, curve in zip(_MARKS, curves, strict=False)]
    dashes = ["- expected at least"] if any(each.expected for each in curves) else []
    return "\n".join(["   GB/s", *lines, " " * 8 + "+" + "-" * width, scale, "; ".join([*names, *dashes])])


def draw(curves: Sequence[Curve]) -> Picture:
    """Return the plot as a picture."""
    curves = _plotted(curves)
    low, high, top = _scales(curves) if curves else (0.0, 1.0, 1.0)
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(size: float, busbw: float) -> tuple[float, float]:
        return _LEFT + (log2(size) - low) / (high - low) * width, _TOP + height * (1 - busbw / top)

    shapes: list[Box | Stroke | Label] = [Box(0, 0, _WIDTH, _HEIGHT, "#ffffff")]
    shapes.append(Label(_LEFT, 20, "bus bandwidth (GB/s) over message size"))
    for tick in range(6):
        y = _TOP + height * (1 - tick / 5)
        shapes.append(Stroke(((_LEFT, y), (_WIDTH - _RIGHT, y)), GREY))
        shapes.append(Label(_LEFT - 8, y + 4, f"{top * tick / 5:g}", 1.0))
    step = max(1, round((high - low) / 8))
    for power in range(round(low), round(high) + 1, step):
        x, _ = at(2.0**power, 0.0)
        shapes.append(Stroke(((x, _TOP), (x, _TOP + height)), GREY))
        shapes.append(Label(x, _TOP + height + 16, size_text(2**power), 0.5))
    for index, (colour, curve) in enumerate(zip(_COLOURS, curves, strict=False)):
        if curve.expected:
            y = at(1.0 if low == 0 else 2.0**low, curve.expected)[1]
            shapes.append(Stroke(((_LEFT, y), (_WIDTH - _RIGHT, y)), colour, dashed=True))
            shapes.append(Label(_LEFT + 6, y - 5, f"expected at least {curve.expected:.0f}", colour=colour))
        if len(curve.points) > 1:
            shapes.append(Stroke(tuple(at(*point) for point in curve.points), colour, 2))
        shapes += [Box(x - 3, y - 3, 6, 6, colour) for x, y in (at(*point) for point in curve.points)]
        place = _LEFT + (index % 2) * width / 2, _HEIGHT - 26 + 14 * (index // 2 % 2)
        shapes.append(Box(place[0], place[1] - 8, 8, 8, colour))
        shapes.append(Label(place[0] + 14, place[1], curve.name[:52]))
    shapes.append(Stroke(((_LEFT, _TOP), (_LEFT, _TOP + height), (_WIDTH - _RIGHT, _TOP + height)), BLACK))
    return Picture(_WIDTH, _HEIGHT, tuple(shapes))


def _plotted(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves that have points, at most one per plot symbol. A curve with one size is drawn as a point."""
    return [each for each in curves if each.points][:_MOST_CURVES]


def _scales(curves: Sequence[Curve]) -> tuple[float, float, float]:
    """Return the scales: the logarithm of the size at both ends of the axis, and the bandwidth at the top."""
    sizes = [size for curve in curves for size, _ in curve.points]
    low, high = log2(min(sizes)), log2(max(sizes))
    if low == high:  # a single size is drawn in the middle of the axis
        low, high = max(0.0, round(low) - 1.0), round(low) + 1.0
    highest = max([busbw for curve in curves for _, busbw in curve.points] + [each.expected or 0.0 for each in curves])
    return low, high, _round_up(highest)


def _round_up(value: float) -> float:
    """Return the smallest round number that is not below the value, such as 1, 1.5, 2.5 or 7.5 times a power of ten."""
    unit = 1.0
    while unit * 10 <= value:
        unit *= 10
    while unit > value > 0:
        unit /= 10
    return next(unit * factor for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7.5, 10, 20) if unit * factor >= value)
