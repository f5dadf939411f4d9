"""Render measured rows as a Markdown table, and write it to docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from quiet import QUIET

MARK = "<!-- written by benchmarks/{script}.py --write: {which} -->"
HEADERS = ("what", "required", "median", "best", "runs", "verdict", "machine")


@dataclass(frozen=True)
class Row:
    """One measurement. `limit_s` limits the median time. `required` is another requirement, and `held` its result."""

    what: str
    limit_s: float | None
    times_s: tuple[float, ...]
    busy: float = 0.0  # largest share of the cores that other processes used just before a run
    note: str = ""
    required: str = ""
    held: bool = True

    @property
    def verdict(self) -> str:
        if not self.times_s:
            return f"not measured: {self.note}"
        if self.limit_s is None and not self.required:
            return self.note
        in_time = self.limit_s is None or median(self.times_s) <= self.limit_s
        met = "met" if in_time and self.held else "**missed**"
        return f"{met}; {self.note}" if self.note else met

    def cells(self) -> tuple[str, ...]:
        required = f"≤ {self.limit_s:g} s" if self.limit_s is not None else self.required
        if not self.times_s:
            return (self.what, required, "", "", "0", self.verdict, "")
        machine = "quiet" if self.busy <= QUIET else f"{self.busy:.0%} busy with others"
        middle, best = seconds(median(self.times_s)), seconds(min(self.times_s))
        return (self.what, required, middle, best, str(len(self.times_s)), self.verdict, machine)


def seconds(value: float) -> str:
    return f"{value:.3f} s" if value < 0.5 else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def render(rows: Sequence[Row]) -> str:
    """Return the table with aligned columns, so that it also reads well in a terminal."""
    return aligned(HEADERS, [row.cells() for row in rows])


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(cells, widths) for cells in (headers, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def put_between_markers(document: str, text: str, script: str) -> str:
    """Return the document with `text` between this script's markers."""
    first, last = (MARK.format(script=script, which=which) for which in ("begin", "end"))
    before, begin, rest = document.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError("the markers are missing")
    return f"{before}{first}\n\n{text.strip()}\n\n{last}{after}"


def write(path: Path, text: str, script: str) -> None:
    path.write_text(put_between_markers(path.read_text(), text, script))
