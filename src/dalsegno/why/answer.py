"""The answer of `dalsegno why`: a timeline, a verdict, and the next command."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dalsegno.hardware.job_variables import JobVariable

AFTER_S = 60.0  # a node event within this time after a run or job failed may explain the failure


@dataclass(frozen=True)
class Moment:
    """One entry of a timeline. `who` is its source: Slurm, the run, the controller, a check, or a person."""

    at: float  # seconds since 1970
    who: str
    text: str


@dataclass(frozen=True)
class Conclusion:
    """The verdict in one sentence, and the next command; "" if there is nothing to do."""

    sentence: str
    next: str = ""


@dataclass(frozen=True)
class Explanation:
    """The complete answer. `subject` is, for example, `node gpu-3`, `run train-x7` or `job 12`."""

    subject: str
    verdict: Conclusion
    moments: tuple[Moment, ...] = ()
    variables: tuple[JobVariable, ...] = ()  # variables that were added to the environment of a run, and why


def merge_timelines(*sources: Iterable[Moment]) -> tuple[Moment, ...]:
    """Merge several sources into one timeline, oldest moment first, without duplicates."""
    once = dict.fromkeys(moment for source in sources for moment in source)
    return tuple(sorted(once, key=lambda moment: moment.at))


def within(moments: Iterable[Moment], since: float, until: float | None) -> list[Moment]:
    return [moment for moment in moments if since <= moment.at and (until is None or moment.at <= until)]
