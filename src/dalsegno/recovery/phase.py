"""The life of a node."""

from __future__ import annotations

from enum import Enum


class NodePhase(Enum):
    """Where a node is between service and service."""

    IN_SERVICE = "in service"
    SUSPECTED = "suspected"  # something is wrong, and it is still in service
    DRAINED = "drained"  # by us: nothing new starts there, what runs may end
    DOWN = "down"  # it is gone; Slurm takes it out of its jobs
    REPAIRING = "repairing"  # reset, rebooted or replaced: we wait for it
    VALIDATING = "validating"
    GIVEN_UP = "given up"  # drained, and a person is needed
    SPARE = "spare"  # validated, kept out of scheduling
    LENT = "lent"  # a spare that was released for a run
    UNKNOWN = "unknown"  # what a controller of another version says

    @classmethod
    def _missing_(cls, value: object) -> NodePhase | None:
        """Read journals and controllers from before `mending` became `repairing`."""
        return cls.REPAIRING if value == "mending" else None

    @classmethod
    def told(cls, value: object) -> NodePhase:
        """Return the phase that a controller names; a word that is not known here is UNKNOWN."""
        try:
            return cls(value)
        except ValueError:
            return cls.UNKNOWN

    @property
    def out(self) -> bool:
        """Out of service by our hand, for a fault."""
        return self in (
            NodePhase.DRAINED,
            NodePhase.DOWN,
            NodePhase.REPAIRING,
            NodePhase.VALIDATING,
            NodePhase.GIVEN_UP,
        )


# ---- Why something that ought to be done for a node is not.


class HeldAction(Enum):
    """`lasting`: until a person says or changes something, or an hour has passed."""

    NO = ""
    PAUSED = "paused"
    OBSERVING = "observing"
    OUT = "too many are out"
    HOUR = "too many within the hour"

    @classmethod
    def of(cls, word: object) -> HeldAction:
        """As a controller says it; of one that speaks otherwise nothing is known."""
        return next((each for each in cls if each.value == word), HeldAction.NO)

    @property
    def lasting(self) -> bool:
        return self in (HeldAction.PAUSED, HeldAction.OBSERVING, HeldAction.HOUR)

    @property
    def ends_with_resume(self) -> bool:
        """`dalsegno automation resume` lets it be done."""
        return self in (HeldAction.PAUSED, HeldAction.HOUR)
