"""The time of a drill as a picture: the loss above, below it a bar for each node, and where faults struck. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dalsegno.drill.story import Drill, Recovery
from dalsegno.printable import in_html

WIDTH, LEFT, RIGHT = 1000, 90, 10
CURVE, LANE, GAP, AXIS = 150, 18, 8, 26  # heights
MOST_POINTS = 800


@dataclass(frozen=True)
class _Scale:
    first: float
    last: float

    def x(self, at: float) -> float:
        share = (at - self.first) / max(self.last - self.first, 1e-9)
        return round(LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT), 1)


def render_picture(drill: Drill) -> str:
    """As SVG, coloured by the page it is in."""
    scale = _Scale(drill.started, drill.told_until)
    height = CURVE + GAP + len(drill.nodes) * (LANE + GAP) + AXIS
    parts = [*_axis(scale, height), *_curve(drill, scale), *_lanes(drill, scale), *_blows(drill, scale, height)]
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="loss and nodes over time">'
    return "\n".join([head, *parts, "</svg>"])


def _axis(scale: _Scale, height: int) -> Iterator[str]:
    span = scale.last - scale.first
    step = next((each for each in (1, 2, 5, 10, 20, 30, 60, 120, 300, 600) if span / each <= 12), 1800)
    for number in range(int(span // step) + 1):
        x = scale.x(scale.first + number * step)
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="{height - AXIS}"/>'
        yield f'<text x="{x}" y="{height - 9}" text-anchor="middle">{number * step} s</text>'


def _curve(drill: Drill, scale: _Scale) -> Iterator[str]:
    steps = drill.steps
    yield '<text x="0" y="14">loss</text>'
    if not steps:
        return
    low, high = min(step.loss for step in steps), max(step.loss for step in steps)
    yield f'<text x="{LEFT - 6}" y="12" text-anchor="end">{high:.2f}</text>'
    yield f'<text x="{LEFT - 6}" y="{CURVE - 4}" text-anchor="end">{low:.2f}</text>'
    every = max(1, len(steps) // MOST_POINTS)
    for generation in sorted({step.generation for step in steps}):
        mine = [step for step in steps if step.generation == generation]
        kept = [*mine[::every], mine[-1]]
        points = " ".join(f"{scale.x(step.at)},{_y(step.loss, low, high)}" for step in kept)
        yield f'<polyline class="curve" points="{points}"><title>generation {generation}</title></polyline>'


def _y(loss: float, low: float, high: float) -> float:
    return round(6 + (high - loss) / max(high - low, 1e-9) * (CURVE - 12), 1)


def _lanes(drill: Drill, scale: _Scale) -> Iterator[str]:
    for number, node in enumerate(drill.nodes):
        top = CURVE + GAP + number * (LANE + GAP)
        yield f'<text x="0" y="{top + 13}">{in_html(node)}</text>'
        yield _bar("well", scale, drill.started, drill.ended, top, f"{node} in service")
        for each in drill.recoveries:
            if each.blow.node == node and each.blow.heals:
                yield from _out_of_service(each, drill, scale, top)


def _out_of_service(each: Recovery, drill: Drill, scale: _Scale, top: int) -> Iterator[str]:
    blow = each.blow
    drained = blow.at + each.drained_s if each.drained_s is not None else drill.ended
    yield _bar("gone", scale, blow.at, drained, top, f"{blow.fault}, not drained yet")
    if each.drained_s is not None:
        returned = blow.at + each.returned_s if each.returned_s is not None else drill.ended
        yield _bar("mending", scale, drained, returned, top, f"{blow.fault}: being mended and validated")


def _bar(kind: str, scale: _Scale, first: float, last: float, top: int, title: str) -> str:
    x = scale.x(first)
    width = max(round(scale.x(last) - x, 1), 1.5)
    return (
        f'<rect class="{kind}" x="{x}" y="{top}" width="{width}" height="{LANE}"><title>{in_html(title)}</title></rect>'
    )


def _blows(drill: Drill, scale: _Scale, height: int) -> Iterator[str]:
    for blow in drill.blows:
        x = scale.x(blow.at)
        title = f"<title>{blow.number}: {in_html(blow.fault)} on {in_html(blow.node)}</title>"
        yield f'<line class="blow" x1="{x}" x2="{x}" y1="0" y2="{height - AXIS}">{title}</line>'
        yield f'<text x="{x + 3}" y="{12 + 12 * (blow.number % 3)}">{blow.number}</text>'
