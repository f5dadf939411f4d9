"""Charts as inline SVG. Colours come from the style sheet. Pure.

The charts of a run share one time axis: loss, step time, and below them generations and faults.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from dalsegno.runs.coordinator.reports.history import StepPoint
from dalsegno.web.html import Markup, join, tag

WIDTH, LEFT, RIGHT = 1000.0, 86.0, 12.0
PANEL, TITLE, LANE, AXIS = 128.0, 28.0, 26.0, 26.0  # heights of a panel, its title, a timeline row, and the axis
MAX_DRAWN = 700  # maximum number of points of a curve
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800)


class TimelineKind(Enum):
    """The kind of a mark on the timeline. The values are class names of the style sheet."""

    FAULT = "fault"
    FAILURE = "failure"
    NOTE = "event"


@dataclass(frozen=True)
class TimelineMark:
    """A moment on the timeline."""

    at: float
    kind: TimelineKind
    text: str


@dataclass(frozen=True)
class Span:
    """A generation on the timeline."""

    start: float
    end: float
    label: str
    text: str


@dataclass(frozen=True)
class _Axis:
    """A linear scale, from values (`low` to `high`) to positions in the chart (`first` to `last`)."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.first + min(max(share, 0.0), 1.0) * (self.last - self.first), 1)


def run_chart(points: Sequence[StepPoint], spans: Sequence[Span], marks: Sequence[TimelineMark], now: float) -> Markup:
    """Return the charts of a run."""
    times = [*(point.at for point in points), *(at for span in spans for at in (span.start, span.end))]
    times += [mark.at for mark in marks]
    if not times:
        return tag("p", "Nothing to draw yet.", class_="empty")
    x = _Axis(min(times), max(*times, min(times) + 1.0), LEFT, WIDTH - RIGHT)
    panels: list[object] = []
    top = 14.0 + TITLE
    for name, unit, column in (("loss", "", 3), ("step time", " s", 4)):
        own = [(point.at, value, point.generation) for point in points if (value := point[column]) is not None]
        if own:
            panels.append(_panel(name, unit, own, x, top))
            top += PANEL + TITLE
    top -= TITLE / 2
    panels.append(_lane(spans, x, top))
    bottom = top + LANE
    drawn = [_marks(marks, x, bottom), _time_axis(x, bottom)]
    height = bottom + AXIS
    label = "loss, step time, generations and faults over time"
    drawing = tag(
        "svg", _grid(x, bottom), panels, drawn, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", aria_label=label,
        class_="chart", data_from=f"{x.low:.3f}", data_to=f"{x.high:.3f}", data_left=f"{LEFT:g}",
        data_right=f"{WIDTH - RIGHT:g}",
    )  # fmt: skip
    return tag("div", drawing, class_="scroll", tabindex="0", role="region", aria_label="charts")


def figure_text(value: float) -> str:
    """Return a number formatted for people, such as 512,300 or 0.0003."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _panel(name: str, unit: str, own: Sequence[tuple[float, float, int]], x: _Axis, top: float) -> Markup:
    values = sorted(value for _, value, _ in own)
    # scale the axis so that one slow first step does not flatten the curve
    high = values[min(len(values) - 1, int(len(values) * 0.995))]
    low = min(values[0], high) if not unit else 0.0  # times start at zero, so that noise does not look like a change
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    y = _Axis(low - (pad if low else 0.0), high + pad, top + PANEL, top)
    curves = [
        tag("polyline", points=_path(own, number, x, y), class_="curve", data_name=name)
        for number in dict.fromkeys(generation for _, _, generation in own)
    ]
    last = own[-1][1]
    texts = [
        tag("text", f"{name} ", tag("tspan", f"{figure_text(last)}{unit}", class_="value"), x="0", y=f"{top - 9:g}",
            class_="name"),
        *(
            tag("text", f"{value:.3g}", x=f"{LEFT - 6:g}", y=f"{y.at(value) + 4:g}", text_anchor="end")
            for value in _ticks(low, high)
        ),
    ]  # fmt: skip
    lines = [
        tag("line", x1=f"{LEFT:g}", x2=f"{WIDTH - RIGHT:g}", y1=y.at(value), y2=y.at(value), class_="grid")
        for value in _ticks(low, high)
    ]
    scale = {"data_low": f"{y.low:.8g}", "data_high": f"{y.high:.8g}", "data_top": f"{top:g}"}
    return tag("g", lines, curves, texts, class_="panel-plot", data_unit=unit, data_height=f"{PANEL:g}", **scale)


def _ticks(low: float, high: float) -> list[float]:
    """Return two to five round values between the bounds; only `low` if the bounds are equal."""
    span = high - low
    if span < 1e-300 or not math.isfinite(span):  # the step between ticks would be 0
        return [low]
    step = 10.0 ** math.floor(math.log10(span))
    while span / step > 4:
        step *= 2 if span / step <= 8 else 5
    while span / step < 2:
        step /= 2
    first = math.ceil(low / step) * step
    return [round(first + number * step, 12) for number in range(int((high - first) / step) + 1)]


def _path(own: Sequence[tuple[float, float, int]], generation: int, x: _Axis, y: _Axis) -> str:
    mine = [(at, value) for at, value, number in own if number == generation]
    every = max(1, math.ceil(len(own) / MAX_DRAWN))
    kept = [*mine[::every], mine[-1]]
    return " ".join(f"{x.at(at):g},{y.at(value):g}" for at, value in kept)


def _lane(spans: Sequence[Span], x: _Axis, top: float) -> Markup:
    return tag("g", [tag("text", "generation", x="0", y=f"{top + 16:g}", class_="name"), *_bars(spans, x, top)])


def _bars(spans: Sequence[Span], x: _Axis, top: float) -> Iterator[Markup]:
    for number, span in enumerate(spans):
        start, width = x.at(span.start), max(x.at(span.end) - x.at(span.start) - 1, 1.5)
        kind = "span odd" if number % 2 else "span"
        shape = tag("rect", x=start, y=top, width=f"{width:g}", height=f"{LANE - 4:g}", rx="3", class_=kind)
        label = tag("text", span.label, x=f"{start + 6:g}", y=f"{top + 15:g}", class_="label") if width > 26 else None
        yield tag("g", tag("title", span.text), shape, label)


def _marks(marks: Sequence[TimelineMark], x: _Axis, bottom: float) -> Markup:
    return join(
        tag(
            "g",
            tag("title", mark.text),
            tag("line", x1=x.at(mark.at), x2=x.at(mark.at), y1="10", y2=f"{bottom:g}"),
            tag("circle", cx=x.at(mark.at), cy="8", r="4"),
            class_=f"mark {mark.kind.value}",
        )
        for mark in marks
    )


def _grid(x: _Axis, bottom: float) -> Markup:
    lines = (tag("line", x1=x.at(at), x2=x.at(at), y1="10", y2=f"{bottom:g}", class_="grid") for at in _times(x))
    return join(lines)


def _time_axis(x: _Axis, bottom: float) -> Markup:
    spread = x.high - x.low
    form = "%H:%M:%S" if spread < 1200 else "%H:%M" if spread < 86400 else "%m-%d %H:%M"
    return join(
        tag("text", time.strftime(form, time.localtime(at)), x=x.at(at), y=f"{bottom + 17:g}", text_anchor="middle")
        for at in _times(x)
    )


def _times(x: _Axis) -> list[float]:
    spread = x.high - x.low
    step = next((each for each in _STEPS_S if spread / each <= 8), _STEPS_S[-1] * math.ceil(spread / _STEPS_S[-1] / 8))
    first = math.ceil(x.low / step) * step
    return [first + number * step for number in range(int((x.high - first) / step) + 1)]


# Small bars


def shares_bar(shares: Sequence[tuple[str, float]], label: str) -> Markup:
    """Return a bar with a segment for each share. A share has the CSS class of its segment, and its size relative to
    the other shares."""
    total = sum(value for _, value in shares) or 1.0
    at, segments = 0.0, []
    for name, value in shares:
        width = 100 * value / total
        if width > 0:
            segments.append(tag("rect", x=f"{at:.3f}", y="0", width=f"{width:.3f}", height="8", class_=f"fill {name}"))
        at += width
    return tag("svg", segments, viewBox="0 0 100 8", preserveAspectRatio="none", class_="shares", role="img",
               aria_label=label)  # fmt: skip


def spark(values: Sequence[float], label: str) -> Markup:
    """Return a small curve without axes."""
    if len(values) < 2:
        return Markup("")
    every = max(1, len(values) // 80)
    kept = [*values[::every], values[-1]]
    low, high = min(kept), max(kept)
    x, y = _Axis(0, len(kept) - 1, 1, 99), _Axis(low, high, 19, 1)
    points = " ".join(f"{x.at(index):g},{y.at(value):g}" for index, value in enumerate(kept))
    line = tag("polyline", points=points, class_="curve")
    return tag("svg", line, viewBox="0 0 100 20", class_="spark", role="img", aria_label=label)
