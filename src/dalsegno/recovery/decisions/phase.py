"""The lifecycle of a node."""

from __future__ import annotations

from enum import Enum


class NodePhase(Enum):
    """The phase of a node in its lifecycle."""

    IN_SERVICE = "in service"
    SUSPECTED = "suspected"  # a fault is suspected, and the node is still in service
    DRAINED = "drained"  # drained by the controller: running jobs may finish, no new ones start
    DOWN = "down"  # the node is lost, and Slurm removes it from its jobs
    REPAIRING = "repairing"  # the node is being reset, rebooted or replaced
    VALIDATING = "validating"
    NEEDS_ADMIN = "needs admin"  # the node stays out of service until an administrator repairs it
    SPARE = "spare"  # the node is validated and kept out of scheduling
    LENT = "lent"  # a spare that is in service for one run
    UNKNOWN = "unknown"  # reported by a controller of another version

    @classmethod
    def _missing_(cls, value: object) -> NodePhase | None:
        """Accept the names that older journals and controllers use for `repairing` and `needs admin`."""
        return {"mending": cls.REPAIRING, "given up": cls.NEEDS_ADMIN}.get(str(value))

    @classmethod
    def parse(cls, value: object) -> NodePhase:
        """Return the phase that a controller reports; UNKNOWN if this version does not know it."""
        try:
            return cls(value)
        except ValueError:
            return cls.UNKNOWN

    @property
    def out(self) -> bool:
        """Return whether a node in this phase is out of service for a repair or a validation."""
        return self in (
            NodePhase.DRAINED,
            NodePhase.DOWN,
            NodePhase.REPAIRING,
            NodePhase.VALIDATING,
            NodePhase.NEEDS_ADMIN,
        )


# Reasons for holding back an action


class HeldAction(Enum):
    """The reasons for holding back an action. A `lasting` reason applies until an administrator intervenes or an hour
    has passed."""

    NO = ""
    PAUSED = "paused"
    OBSERVING = "observing"
    OUT = "too many are out"
    HOUR = "too many within the hour"

    @classmethod
    def of(cls, word: object) -> HeldAction:
        """Return the reason that a controller reports; NO if this version does not know it."""
        return next((each for each in cls if each.value == word), HeldAction.NO)

    @property
    def lasting(self) -> bool:
        return self in (HeldAction.PAUSED, HeldAction.OBSERVING, HeldAction.HOUR)

    @property
    def ends_with_resume(self) -> bool:
        """Return whether `dalsegno automation resume` ends the restriction."""
        return self in (HeldAction.PAUSED, HeldAction.HOUR)
