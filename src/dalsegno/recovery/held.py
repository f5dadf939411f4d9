"""Why something that ought to be done for a node is not."""

from __future__ import annotations

from enum import Enum


class Held(Enum):
    """`lasting`: until a person says or changes something, or an hour has passed."""

    NO = ""
    PAUSED = "paused"
    OBSERVING = "observing"
    OUT = "too many are out"
    HOUR = "too many within the hour"

    @classmethod
    def of(cls, word: object) -> Held:
        """As a controller says it; of one that speaks otherwise nothing is known."""
        return next((each for each in cls if each.value == word), Held.NO)

    @property
    def lasting(self) -> bool:
        return self in (Held.PAUSED, Held.OBSERVING, Held.HOUR)

    @property
    def ends_with_resume(self) -> bool:
        """`dalsegno automation resume` lets it be done."""
        return self in (Held.PAUSED, Held.HOUR)
