"""Compare Dal Segno with another tool: medians, 95th percentiles, the ratio, and the required limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from table import aligned, seconds

HEADERS = (
    "what",
    "required",
    "ours p50",
    "ours p95",
    "runs",
    "other tool",
    "other p50",
    "other runs",
    "times faster",
    "verdict",
)
NEVER = (120.0, 180.0)  # time limits of restart.py: a time equal to one of them means "did not recover"


@dataclass(frozen=True)
class Compared:
    """One measurement of both tools; times in seconds unless `unit` says otherwise."""

    what: str
    ours: Sequence[float]
    theirs: Sequence[float]
    rival: str
    limit_s: float | None = None
    limit_95_s: float | None = None
    ratio: float | None = None
    unit: str = "s"

    @property
    def met(self) -> bool:
        fast = self.limit_s is None or median(self.ours) <= self.limit_s
        steady = self.limit_95_s is None or p95(self.ours) <= self.limit_95_s
        return fast and steady and (self.ratio is None or not self.theirs or self.times_faster >= self.ratio)

    @property
    def times_faster(self) -> float:
        return median(self.theirs) / median(self.ours)

    @property
    def required(self) -> str:
        parts = [f"≤ {self.limit_s:g} {self.unit}".strip() if self.limit_s is not None else ""]
        parts += [f"p95 ≤ {self.limit_95_s:g} s" if self.limit_95_s is not None else ""]
        parts += [f"{self.ratio:g} times faster" if self.ratio is not None else ""]
        return ", ".join(part for part in parts if part)

    def cells(self) -> tuple[str, ...]:
        other = ("", "", "", "")
        if self.theirs:
            other = (self.rival, self._their_time(), str(len(self.theirs)), f"{self.times_faster:.1f}")
        verdict = "met" if self.met else "**missed**"
        ours = (self._show(median(self.ours)), self._show(p95(self.ours)), str(len(self.ours)))
        return (self.what, self.required, *ours, *other, verdict)

    def _their_time(self) -> str:
        never = sum(value in NEVER for value in self.theirs)
        note = f" ({never} of {len(self.theirs)} did not recover)" if never else ""
        return f"{seconds(median(self.theirs))}{note}"

    def _show(self, value: float) -> str:
        return seconds(value) if self.unit else f"{value:.3f}"

    def line(self) -> str:
        shown = ", ".join(self._show(value) for value in self.ours)
        return f"{self.what}: {shown}" + (
            f"; {self.rival}: {', '.join(map(seconds, self.theirs))}" if self.theirs else ""
        )


def p95(values: Sequence[float]) -> float:
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def render(rows: Sequence[Compared]) -> str:
    return aligned(HEADERS, [row.cells() for row in rows])
