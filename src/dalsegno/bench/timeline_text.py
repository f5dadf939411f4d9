"""A step of every rung as two lines of characters: compute above, communication below. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.bench.ladder_report import Mark, RungResult

LETTERS = {"forward": "f", "backward": "b", "update": "u", "communicate": "="}
LEGEND = "f forward, b backward, u update, = communication; of rank 0"


def draw(rungs: Sequence[RungResult], width: int = 72) -> str:
    """All rungs on one scale, so that a longer line is a longer step."""
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


def _lane(marks: Sequence[Mark], last: float, width: int, *, communicating: bool) -> str:
    cells = [" "] * width
    for mark in marks:
        if (mark.kind == "communicate") == communicating:
            begin = min(int(mark.begin_s / last * width), width - 1)
            end = max(begin + 1, round(mark.end_s / last * width))
            cells[begin:end] = LETTERS[mark.kind] * (end - begin)
    return "".join(cells[:width])
