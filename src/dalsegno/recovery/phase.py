"""The life of a node."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    IN_SERVICE = "in service"
    SUSPECTED = "suspected"  # something is wrong, and it is still in service
    DRAINED = "drained"  # by us: nothing new starts there, what runs may end
    DOWN = "down"  # it is gone; Slurm takes it out of its jobs
    MENDING = "mending"  # reset, rebooted or replaced: we wait for it
    VALIDATING = "validating"
    GIVEN_UP = "given up"  # drained, and a person is needed
    SPARE = "spare"  # validated, kept out of scheduling
    LENT = "lent"  # a spare that was released for a run

    @property
    def out(self) -> bool:
        """Out of service by our hand, for a fault."""
        return self in (Phase.DRAINED, Phase.DOWN, Phase.MENDING, Phase.VALIDATING, Phase.GIVEN_UP)
