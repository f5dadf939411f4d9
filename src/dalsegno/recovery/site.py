"""What the controller is told of its cluster by whoever starts it."""

from __future__ import annotations

from typing import Protocol

from dalsegno.recovery.hands import Slurm
from dalsegno.recovery.policy import Policy


class Site(Protocol):
    """One cluster. Its policy may change while the controller runs: it is asked for again."""

    @property
    def slurm(self) -> Slurm: ...

    @property
    def target(self) -> object:
        """It may be able to reset, reboot and replace nodes: its type tells."""
        ...

    @property
    def slurm_users(self) -> frozenset[str]:
        """Under whom Slurm's daemons write why they take a node out of service."""
        ...

    def policy(self) -> Policy: ...

    def is_being_changed(self) -> bool:
        """Whether an `up` or a `down` is at work: what it does to nodes is no fault of theirs."""
        ...
