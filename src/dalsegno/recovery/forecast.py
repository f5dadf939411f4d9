"""What will be done for a node that is out of service, as things are now; by the functions that decide it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dalsegno.health import Remedy
from dalsegno.recovery.book import Book, NodeBook
from dalsegno.recovery.budget import restraint
from dalsegno.recovery.held import Held
from dalsegno.recovery.ladder import next_step
from dalsegno.recovery.phase import Phase
from dalsegno.recovery.policy import OFF, Policy
from dalsegno.train.frames import Message


@dataclass(frozen=True)
class Forecast:
    """`how` is what comes next, None where that is nothing; `held`: it comes only when this is over."""

    how: Remedy | None
    why: str = ""  # nothing lighter, or nothing at all
    held: Held = Held.NO

    def message(self) -> Message:
        return {"how": self.how.value if self.how else "", "why": self.why, "held_back": self.held.value}

    @classmethod
    def read(cls, told: object) -> Forecast | None:
        """As a controller says it; None where it says nothing, or speaks otherwise."""
        if not isinstance(told, dict) or "how" not in told:
            return None
        how = next((each for each in Remedy if each.value == told["how"]), None)
        return cls(how, str(told.get("why", "")), Held.of(told.get("held_back")))


def forecast(own: NodeBook, partitions: Collection[str], book: Book, policy: Policy, now: float) -> Forecast | None:
    """None where nothing is to come: it is in service, under way, or given up. How many may be out, and how many an
    hour, was asked when it was taken out: whatever is out is mended, as far as reboots and replacements go."""
    if own.fault is None or own.phase not in (Phase.DRAINED, Phase.DOWN):
        return None
    if policy.mode == OFF:
        return Forecast(None, "the cluster file says that nodes are left alone")
    if book.blind:
        return Forecast(None, "the controller sees hardly a node: nothing is done until it does")
    if own.fault.remedy is Remedy.DRAIN:
        return Forecast(Remedy.DRAIN)
    step = next_step(own, own.fault, partitions, book, policy, now)
    if isinstance(step, str):
        return Forecast(None, step)
    held = restraint(book, policy)
    return Forecast(step.how, step.why, held.held if held else Held.NO)
