"""What a controller tells of a node that it looks after, read once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dalsegno.health import Remedy
from dalsegno.health import Verdict as CheckVerdict
from dalsegno.recovery.fault import Fault
from dalsegno.recovery.forecast import Forecast
from dalsegno.recovery.held import Held
from dalsegno.recovery.phase import Phase
from dalsegno.recovery.reason import SLURM_USERS, read_reason, slurm_users_of
from dalsegno.recovery.topic import Topic
from dalsegno.why.answer import Moment


@dataclass(frozen=True)
class Care:
    """Its phase (None where nobody looks after it), what was said of it last, and what was found and done."""

    phase: Phase | None = None
    note: str = ""
    held: Held = Held.NO  # why that is all that was done
    tried: Remedy | None = None  # last
    ahead: Forecast | None = None  # what is to be done for it
    moments: tuple[Moment, ...] = ()
    failing: tuple[str, ...] = ()  # checks of which the last word is that they fail, with what they found
    slurm_users: frozenset[str] = SLURM_USERS
    excused: tuple[str, ...] = ()  # what is wrong with it and left to whoever has returned it
    fault: Fault | None = None  # for which it is out now; Slurm's reason tells what it was taken out for
    about: Topic = Topic.OTHER  # what the note is about


def read_care(told: Mapping[str, Any]) -> Care:
    """From the controller's answer; a controller of another version may have words that are not known here."""
    own = told.get("node", {})
    phase = Phase.told(own["phase"]) if "phase" in own else None
    return Care(
        phase,
        str(own.get("note", "")),
        Held.of(own.get("held_back")),
        next((each for each in Remedy if each.value in own.get("tried", ())[-1:]), None),
        Forecast.read(told.get("ahead")),
        tuple(_moments(told)),
        _failing(told),
        slurm_users_of(told),
        tuple(map(str, own.get("excused", ()))),
        read_reason(str(own.get("reason", ""))),
        Topic(own.get("about")),
    )


def _moments(told: Mapping[str, Any]) -> Iterator[Moment]:
    for event in told.get("events", ()):
        yield Moment(float(event["at"]), "controller", str(event["text"]))
    for each in told.get("checks", ()):
        yield Moment(float(each["at"]), "check", f"{each['check']} {each['verdict']}: {each['text']}")


def _failing(told: Mapping[str, Any]) -> tuple[str, ...]:
    last = {str(each["check"]): each for each in sorted(told.get("checks", ()), key=lambda each: float(each["at"]))}
    return tuple(
        f"{check} ({each['text']})" for check, each in last.items() if each["verdict"] == CheckVerdict.FAILED.value
    )
