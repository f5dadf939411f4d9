"""What to do about a coordinator that is not running (any more). Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from dalsegno.recovery.records import Record
from dalsegno.runs.coordinator.program import MOST_SHORT_LIVES, SHORT_LIFE_S

OVER = 0  # by this code alone a coordinator says that its run is over: Python's own failures end with 1
PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # after the first short life, the second …


class Do(Enum):
    FORGET = "forget"  # the run is over
    START = "start"
    GIVE_UP = "give up"
    WATCH = "watch"  # it lives
    LEAVE = "leave"


@dataclass(frozen=True)
class Step:
    """What to do, when, and the record as it is from now on."""

    do: Do
    record: Record
    after_s: float = 0.0


def after_end(record: Record, code: int | None, lived_s: float) -> Step:
    """A coordinator has ended. `code` is None where no one can tell: one that an earlier controller had started.

    Such a one is started again: a coordinator whose run is over sees that and says so.
    """
    gone = replace(record, pid=0, start=0)
    if code == OVER:
        return Step(Do.FORGET, gone)
    if lived_s >= SHORT_LIFE_S:
        return Step(Do.START, replace(gone, short_lives=0))
    gone = replace(gone, short_lives=record.short_lives + 1)
    if gone.short_lives >= MOST_SHORT_LIVES:
        return Step(Do.GIVE_UP, replace(gone, given_up=True))
    return Step(Do.START, gone, PAUSES_S[min(gone.short_lives, len(PAUSES_S)) - 1])


def at_start(record: Record, lives: bool) -> Step:
    """The controller has come (back) and finds this record."""
    if lives:
        return Step(Do.WATCH, record)
    if record.given_up:
        return Step(Do.LEAVE, record)
    return Step(Do.START, replace(record, pid=0, start=0))


def when_asked(wanted: Record, known: Record | None) -> Step | None:
    """Someone asks for a run. None: its id is taken by another. One that was given up is tried again."""
    if known is None:
        return Step(Do.START, wanted)
    if known.uid != wanted.uid:
        return None
    if known.given_up:
        return Step(Do.START, wanted)
    return Step(Do.LEAVE, known) if known.folder == wanted.folder else None
