"""An answer: what was noted by whom, in order, what it comes to, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

AFTER_S = 60.0  # what befell a node so soon after a run or job had failed may be why


@dataclass(frozen=True)
class Moment:
    """Something that was noted. `who`: Slurm, the run, the controller, a check, or `inject`."""

    at: float  # seconds since 1970
    who: str
    text: str


@dataclass(frozen=True)
class Conclusion:
    """What it comes to, in a sentence, and the command to go on with; none where there is nothing to do."""

    sentence: str
    next: str = ""


@dataclass(frozen=True)
class Explanation:
    """`subject`: `node gpu-3`, `run train-x7`, `job 12`."""

    subject: str
    verdict: Conclusion
    moments: tuple[Moment, ...] = ()


def in_order(*sources: Iterable[Moment]) -> tuple[Moment, ...]:
    """What several have noted as one timeline; what two have told alike stands there once."""
    once = dict.fromkeys(moment for source in sources for moment in source)
    return tuple(sorted(once, key=lambda moment: moment.at))


def within(moments: Iterable[Moment], since: float, until: float | None) -> list[Moment]:
    return [moment for moment in moments if since <= moment.at and (until is None or moment.at <= until)]
