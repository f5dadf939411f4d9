"""An answer: what was noted by whom, in order, what it comes to, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Moment:
    """Something that was noted. `who`: Slurm, the run, the controller, or a check."""

    at: float  # seconds since 1970
    who: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What it comes to, in a sentence, and the command to go on with; none where there is nothing to do."""

    sentence: str
    next: str = ""


@dataclass(frozen=True)
class Answer:
    """`subject`: `node gpu-3`, `run train-x7`, `job 12`."""

    subject: str
    verdict: Verdict
    moments: tuple[Moment, ...] = ()


def in_order(*sources: Iterable[Moment]) -> tuple[Moment, ...]:
    """What several have noted as one timeline."""
    return tuple(sorted((moment for source in sources for moment in source), key=lambda moment: moment.at))
