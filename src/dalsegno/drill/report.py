"""The report of a drill: as text, JSON and an HTML page. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dalsegno.drill.impacts import Drill, DrillMark, DrillMarkKind, FaultImpact, Recovery, TrainingStop
from dalsegno.printable import in_html

COLUMNS = ["#", "FAULT", "NODE", "DETECTED", "DRAINED", "RESUMED", "BACK IN SERVICE", "STEPS LOST"]


def rows(drill: Drill) -> list[list[str]]:
    """Return a row for each fault, with the cells of COLUMNS."""
    return [_row(drill, each) for each in drill.recoveries]


def _row(drill: Drill, each: Recovery) -> list[str]:
    impact = each.impact
    waited = ", no spare ready" if impact.without_spare else ""
    resumed = seconds(each.resumed_s) + waited if each.stopped else "no stop"
    unseen = "held back" if impact.node in drill.held_back else "not seen"
    healed = [seconds(each.drained_s, unseen), seconds(each.returned_s, unseen)] if impact.needs_repair else ["", ""]
    times = [seconds(each.known_s), healed[0], resumed, healed[1]]
    return [str(impact.number), impact.fault, impact.node, *times, str(each.steps_lost)]


def seconds(value: float | None, unseen: str = "not seen") -> str:
    return unseen if value is None else f"{value:.1f} s"


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def sentences(drill: Drill) -> list[str]:
    """Return the summary of the drill, one sentence per item."""
    found = [_outcome(drill), _time(drill)]
    resumed = [each.resumed_s for each in drill.recoveries if each.resumed_s is not None]
    resumed += [stop.for_s for stop in drill.more_stops]
    if resumed:
        found.append(f"training resumed after {median(resumed):.1f} s (median), {max(resumed):.1f} s at most")
        found += _describe_missing_spares(drill)
        found += [_describe_stop(stop) for stop in drill.more_stops]
    if drill.exact is not None:
        same = (
            "are identical to those of an undisturbed run, bit for bit"
            if drill.exact
            else "DIFFER from those of an undisturbed run"
        )
        found.append(f"the weights {same}")
    if drill.troubles:
        found.append(f"the undisturbed run had a fault of its own: {drill.troubles}")
    if drill.orphans:
        found.append(f"{drill.orphans} processes were left behind")
    found += [f"{node} is not repaired: {why}" for node, why in drill.held_back.items()]
    return found


def _describe_missing_spares(drill: Drill) -> list[str]:
    """Return a sentence about the faults that hit while no spare was ready; empty if there were none."""
    count = sum(each.impact.without_spare for each in drill.recoveries)
    rest = [each.resumed_s for each in drill.recoveries if each.resumed_s is not None and not each.impact.without_spare]
    if not count:
        return []
    others = f"; after the others it took {max(rest):.1f} s at most" if rest else ""
    return [f"{count} of these hit while no spare was ready and had to wait for a node{others}"]


def _describe_stop(stop: TrainingStop) -> str:
    """Return a sentence about a stop that is not the direct effect of a fault."""
    impact = stop.impact
    after = f" {max(stop.after_s, 0.0):.1f} s after {impact.fault} on {impact.node}" if impact else ""
    return f"training also stopped{after}, for {stop.for_s:.1f} s" + (f" ({stop.why})" if stop.why else "")


def _outcome(drill: Drill) -> str:
    faults = counted(len(drill.impacts), "fault")
    if drill.exit_code:
        return f"the run ended with exit code {drill.exit_code} after {faults}"
    return f"the run survived {faults}; {drill.steps_lost} of {len(drill.steps)} steps were repeated"


def _time(drill: Drill) -> str:
    spent = [f"{kind} {drill.goodput[kind]:.1f} s" for kind in drill.goodput if drill.goodput[kind] >= 0.05]
    return f"goodput {drill.share:.0%} of the run's {sum(drill.goodput.values()):.0f} s ({', '.join(spent)})"


def as_json(drill: Drill) -> dict[str, Any]:
    """Return the whole report for programs."""
    recoveries = [{**_impact(each.impact), **_figures(each)} for each in drill.recoveries]
    whole = {"seed": drill.seed, "survived": drill.survived, "exit_code": drill.exit_code, "exact": drill.exact}
    times = {"started": drill.started, "ended": drill.ended, "goodput": dict(drill.goodput), "share": drill.share}
    steps = {
        "steps": len(drill.steps),
        "steps_lost": drill.steps_lost,
        "orphans": drill.orphans,
        "troubles": drill.troubles,
    }
    more = [_stop(each) for each in drill.more_stops]
    marks: Sequence[object] = [_mark(mark) for mark in drill.marks]
    details = {"faults": recoveries, "more_stops": more, "held_back": dict(drill.held_back), "events": marks}
    return {**whole, **times, **steps, **details}


def _impact(impact: FaultImpact) -> dict[str, Any]:
    """Return a fault for the JSON report, in which `needs_repair` is called `heals`."""
    return {"heals" if name == "needs_repair" else name: value for name, value in asdict(impact).items()}


def _mark(mark: DrillMark) -> dict[str, Any]:
    return {"at": mark.at, "what": mark.kind.value, "node": mark.node, "text": mark.text}


def _stop(each: TrainingStop) -> dict[str, Any]:
    number = each.impact.number if each.impact else None
    return {"after_fault": number, "after_s": each.after_s, "for_s": each.for_s, "why": each.why}


def _figures(each: Recovery) -> dict[str, float | int | None]:
    times = {"known_s": each.known_s, "drained_s": each.drained_s, "resumed_s": each.resumed_s}
    return {**times, "returned_s": each.returned_s, "steps_lost": each.steps_lost}


# The timeline as a picture: the loss at the top, a bar for each node below it, a line for each injected fault


WIDTH, LEFT, RIGHT = 1000, 90, 10
CURVE, LANE, GAP, AXIS = 150, 18, 8, 26  # heights in pixels
MAX_POINTS = 800


@dataclass(frozen=True)
class _Scale:
    first: float
    last: float

    def x(self, at: float) -> float:
        share = (at - self.first) / max(self.last - self.first, 1e-9)
        return round(LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT), 1)


def render_picture(drill: Drill) -> str:
    """Return the timeline as SVG. Its colours come from the style sheet of the page."""
    scale = _Scale(drill.started, drill.last_event_at)
    height = CURVE + GAP + len(drill.nodes) * (LANE + GAP) + AXIS
    parts = [*_axis(scale, height), *_curve(drill, scale), *_lanes(drill, scale), *_fault_lines(drill, scale, height)]
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
    every = max(1, len(steps) // MAX_POINTS)
    for generation in sorted({step.generation for step in steps}):
        own = [step for step in steps if step.generation == generation]
        kept = [*own[::every], own[-1]]
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
            if each.impact.node == node and each.impact.needs_repair:
                yield from _out_of_service(each, drill, scale, top)


def _out_of_service(each: Recovery, drill: Drill, scale: _Scale, top: int) -> Iterator[str]:
    impact = each.impact
    drained = impact.at + each.drained_s if each.drained_s is not None else drill.ended
    yield _bar("gone", scale, impact.at, drained, top, f"{impact.fault}, not drained yet")
    if each.drained_s is not None:
        returned = impact.at + each.returned_s if each.returned_s is not None else drill.ended
        yield _bar("repairing", scale, drained, returned, top, f"{impact.fault}: being repaired and validated")


def _bar(kind: str, scale: _Scale, first: float, last: float, top: int, title: str) -> str:
    x = scale.x(first)
    width = max(round(scale.x(last) - x, 1), 1.5)
    return (
        f'<rect class="{kind}" x="{x}" y="{top}" width="{width}" height="{LANE}"><title>{in_html(title)}</title></rect>'
    )


def _fault_lines(drill: Drill, scale: _Scale, height: int) -> Iterator[str]:
    for impact in drill.impacts:
        x = scale.x(impact.at)
        title = f"<title>{impact.number}: {in_html(impact.fault)} on {in_html(impact.node)}</title>"
        yield f'<line class="fault" x1="{x}" x2="{x}" y1="0" y2="{height - AXIS}">{title}</line>'
        yield f'<text x="{x + 3}" y="{12 + 12 * (impact.number % 3)}">{impact.number}</text>'


# The report as one self-contained HTML page


STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #67717e; --paper: #fdfdfb; --line: #d8dce2;
  --well: #3d8f6e; --gone: #c8453b; --repairing: #d9982b; --curve: #3566b8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --dim: #97a1ae; --paper: #14181e; --line: #333b46;
  --well: #4fae88; --gone: #e0695f; --repairing: #e0aa4c; --curve: #79a5ea; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
p.legend { color: var(--dim); font-size: .85rem; } p.when { color: var(--dim); margin: .1rem 0 1.2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--dim); font-size: .8rem; } td.text { white-space: normal; }
svg { width: 100%; height: auto; min-width: 40rem; } svg text { font: 11px system-ui, sans-serif; fill: var(--dim); }
.well { fill: var(--well); } .gone { fill: var(--gone); } .repairing { fill: var(--repairing); }
.grid { stroke: var(--line); } .fault { stroke: var(--gone); stroke-dasharray: 3 3; }
.curve { stroke: var(--curve); fill: none; stroke-width: 1.6; }
""".strip()


LEGEND = (
    '<p class="legend"><b style="color:var(--well)">■</b> in service <b style="color:var(--gone)">■</b> hit, '
    'not out of service yet <b style="color:var(--repairing)">■</b> out of service: being repaired and validated</p>'
)


@dataclass(frozen=True)
class Comparison:
    """The times of this drill and of other tools for the same fault, and notes on their limits."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str]


def render_page(drill: Drill, title: str = "Drill", beside: Comparison | None = None) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(drill.started))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{in_html(title)}</title><style>{STYLE}</style></head><body>",
        f'<h1>{in_html(title)}</h1><p class="when">{when}, seed {drill.seed}</p>',
        "<ul>" + "".join(f"<li>{in_html(line)}</li>" for line in sentences(drill)) + "</ul>",
        _render_comparison(beside) if beside else "",
        f'<h2>Loss and nodes over time</h2><div class="wide">{render_picture(drill)}</div>{LEGEND}',
        f"<h2>Faults</h2>{_table(COLUMNS, rows(drill))}",
        f"<h2>Events</h2>{_table(['AFTER', 'WHAT', 'NODE', ''], _events(drill))}",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _render_comparison(beside: Comparison) -> str:
    notes = "".join(f'<p class="legend">{in_html(note)}</p>' for note in beside.notes)
    return f"<h2>Comparison</h2>{_table(beside.head, beside.lines)}{notes}"


def _events(drill: Drill) -> list[list[str]]:
    impacts = [DrillMark(impact.at, DrillMarkKind.INJECTED, impact.node, impact.fault) for impact in drill.impacts]
    noted = sorted([*impacts, *drill.marks], key=lambda mark: mark.at)
    return [[f"{mark.at - drill.started:.2f} s", mark.kind.value, mark.node, mark.text] for mark in noted]


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{in_html(word)}</th>" for word in head)
    body = "".join(f"<tr>{_cells(line)}</tr>\n" for line in lines)
    return f'<div class="wide"><table><tr>{top}</tr>\n{body}</table></div>'


def _cells(line: Sequence[str]) -> str:
    *short, last = line
    return "".join(f"<td>{in_html(word)}</td>" for word in short) + f'<td class="text">{in_html(last)}</td>'
