"""Jobs as bars over time, in plain characters: waiting is dotted, running is solid. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """A job: what is written left and right of it, and its times in seconds from any common start."""

    label: str
    note: str
    submitted: float
    started: float
    ended: float


def draw(bars: Sequence[Bar], width: int = 48, *, solid: str = "█", dotted: str = "·") -> str:
    """One line a bar, and a scale below."""
    first = min(bar.submitted for bar in bars)
    last = max(bar.ended for bar in bars)
    per_s = width / max(last - first, 1.0)
    label_width = max(len(bar.label) for bar in bars)

    def column(at: float) -> int:
        return round((at - first) * per_s)

    lines = []
    for bar in bars:
        start, end = column(bar.started), max(column(bar.ended), column(bar.started) + 1)
        track = " " * column(bar.submitted) + dotted * (start - column(bar.submitted)) + solid * (end - start)
        lines.append(f"{bar.label.ljust(label_width)}  {track.ljust(width)}  {bar.note}")
    return "\n".join([*lines, f"{' ' * label_width}  {_scale(last - first, width)}"])


def _scale(seconds: float, width: int) -> str:
    right = f"{seconds:.0f} s"
    return "0 s" + right.rjust(width - 3)
