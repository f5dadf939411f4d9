"""What a benchmark of the ladder found: times, messages, bytes and spans of every rung, as values and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

BASELINE = "ddp"  # with torch's own bucket_cap_mb


@dataclass(frozen=True)
class Traffic:
    """One rank's messages in one step; `computed`: what a ring all-reduce needs, not what was counted."""

    calls: int
    messages: int
    sent_bytes: int
    received_bytes: int
    computed: bool
    tcp_bytes: int | None = None  # sent, by the kernel's count; None where it does not go over TCP


@dataclass(frozen=True)
class Mark:
    """A span of one rank's step, in seconds from its start: forward, backward, update or communicate."""

    rank: int
    kind: str
    label: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class RungResult:
    """One rung. `steps_s`: each step as its slowest rank saw it; `why_not`: it was not measured, and why."""

    name: str
    steps_s: tuple[float, ...] = ()
    traffic: tuple[Traffic, ...] = ()  # by rank
    marks: tuple[Mark, ...] = ()
    why_not: str = ""

    @property
    def median_s(self) -> float:
        return median(self.steps_s)

    @property
    def busiest(self) -> Traffic | None:
        """The rank that sends most: it is what the others wait for."""
        return max(self.traffic, key=lambda each: each.sent_bytes, default=None)


@dataclass(frozen=True)
class LadderReport:
    """All rungs, and what they ran on."""

    processes: int
    backend: str
    device: str
    torch: str
    parameters: int
    gradient_bytes: int
    rungs: tuple[RungResult, ...] = field(default=())

    @property
    def headline(self) -> str:
        where = f"{count_processes(self.processes)}, {self.backend} on {self.device}"
        return f"{where}, {self.gradient_bytes / 2**20:.2f} MiB of gradients"

    def ratio(self, rung: RungResult) -> float | None:
        """Its time in times of DDP's; None where either is missing."""
        ddp = next((each for each in self.rungs if each.name == BASELINE), None)
        return rung.median_s / ddp.median_s if rung.steps_s and ddp and ddp.steps_s else None

    def to_dict(self) -> dict[str, Any]:
        rungs = [
            {**asdict(each), "median_s": each.median_s if each.steps_s else None, "times_ddp": self.ratio(each)}
            for each in self.rungs
        ]
        return {**asdict(self), "rungs": rungs}


def count_processes(number: int) -> str:
    return f"{number} process{'es' * (number != 1)}"


def read_report(text: str) -> LadderReport:
    found = json.loads(text)
    return LadderReport(**{**found, "rungs": tuple(_rung(each) for each in found["rungs"])})


def _rung(found: dict[str, Any]) -> RungResult:
    return RungResult(
        name=found["name"],
        steps_s=tuple(found["steps_s"]),
        traffic=tuple(Traffic(**each) for each in found["traffic"]),
        marks=tuple(Mark(**each) for each in found["marks"]),
        why_not=found["why_not"],
    )
