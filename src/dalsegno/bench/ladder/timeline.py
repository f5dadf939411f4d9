"""Draw one step of every rung, with a lane of compute and a lane of communication for each rank. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from dalsegno.bench.ladder.ladder import LadderReport, RungResult, StepSpan

COLOURS = {"forward": "#4c78a8", "backward": "#72a5d8", "update": "#9ecae9", "communicate": "#f58518"}
_LEFT, _WIDTH, _LANE, _GAP, _TOP, _TICKS = 170, 900, 9, 10, 54, 8


def render_svg(report: LadderReport) -> str:
    """Return an SVG of all rungs on one scale. A browser shows the times of the span under the mouse pointer."""
    shown = [each for each in report.rungs if each.marks]
    last_s = max((mark.end_s for each in shown for mark in each.marks), default=1e-3)
    blocks, bottom = _blocks(shown, last_s)
    width, height = _LEFT + _WIDTH + 30, bottom + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        "<!-- made by dalsegno bench ddp -->",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-size="14">One training step: {escape(report.headline)}</text>',
        *_legend(),
        *_scale(last_s, bottom),
        *blocks,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _blocks(rungs: Sequence[RungResult], last_s: float) -> tuple[list[str], int]:
    lines, top = [], _TOP
    for rung in rungs:
        ranks = sorted({mark.rank for mark in rung.marks})
        lines.append(f'<text x="10" y="{top + _LANE}" font-weight="bold">{escape(rung.name)}</text>')
        for at, rank in enumerate(ranks):
            y = top + at * (2 * _LANE + 3)
            lines.append(f'<text x="{_LEFT - 8}" y="{y + _LANE + 3}" text-anchor="end">rank {rank}</text>')
            lines += [_bar(mark, y, last_s) for mark in rung.marks if mark.rank == rank]
        top += len(ranks) * (2 * _LANE + 3) + _GAP
    return lines, top


def _bar(mark: StepSpan, y: int, last_s: float) -> str:
    x, end = (_LEFT + at / last_s * _WIDTH for at in (mark.begin_s, mark.end_s))
    lane = y + (_LANE if mark.kind == "communicate" else 0)
    what = f"{mark.label or mark.kind}: {mark.begin_s * 1000:.2f} to {mark.end_s * 1000:.2f} ms"
    shape = f'x="{x:.1f}" y="{lane}" width="{max(end - x, 0.6):.1f}" height="{_LANE}"'
    paint = f'fill="{COLOURS[mark.kind]}" stroke="white" stroke-width="0.4"'
    return f"<rect {shape} {paint}><title>{escape(what)}</title></rect>"


def _legend() -> Iterator[str]:
    for at, (kind, colour) in enumerate(COLOURS.items()):
        x = _LEFT + at * 130
        yield f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/><text x="{x + 15}" y="37">{kind}</text>'


def _scale(last_s: float, bottom: int) -> Iterator[str]:
    for tick in range(_TICKS + 1):
        x = _LEFT + tick * _WIDTH / _TICKS
        at = f"{last_s * 1000 * tick / _TICKS:.1f}"
        yield f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{at}{" ms" if tick == _TICKS else ""}</text>'


# Drawing as text: for each rung a line of compute, and below it a line of communication

LETTERS = {"forward": "f", "backward": "b", "update": "u", "communicate": "="}
LEGEND = "f forward, b backward, u update, = communication; of rank 0"


def draw(rungs: Sequence[RungResult], width: int = 72) -> str:
    """Return two lines of text per rung, which show rank 0. All rungs are on one scale."""
    shown = [(each.name, [mark for mark in each.marks if mark.rank == 0]) for each in rungs if each.marks]
    if not shown:
        return ""
    last = max(mark.end_s for _, marks in shown for mark in marks)
    label = max(len(name) for name, _ in shown)
    lines = []
    for name, marks in shown:
        lines.append(f"{name.ljust(label)}  {_lane(marks, last, width, communicating=False)}".rstrip())
        lines.append(f"{' ' * label}  {_lane(marks, last, width, communicating=True)}".rstrip())
    right = f"{last * 1000:.1f} ms"
    return "\n".join([*lines, f"{' ' * label}  0 ms{right.rjust(width - 4)}", LEGEND])


def _lane(marks: Sequence[StepSpan], last: float, width: int, *, communicating: bool) -> str:
    cells = [" "] * width
    for mark in marks:
        if (mark.kind == "communicate") == communicating:
            begin = min(int(mark.begin_s / last * width), width - 1)
            end = max(begin + 1, round(mark.end_s / last * width))
            cells[begin:end] = LETTERS[mark.kind] * (end - begin)
    return "".join(cells[:width])
