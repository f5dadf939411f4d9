"""What may be done, how much of it, and how long we wait. Data, from the cluster file and the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.health import Remedy
from dalsegno.health.settings import PHASE_S
from dalsegno.recovery.act import SlurmActions
from dalsegno.recovery.facts import NodeFault
from dalsegno.recovery.reason import SLURM_USERS
from dalsegno.spec.facts import Health

AUTO, OBSERVE, OFF = "auto", "observe", "off"


@dataclass(frozen=True)
class Policy:
    """Times in seconds. `can` is what the target is able to do for a node."""

    mode: str = AUTO
    max_out: float = 0.25
    per_hour: int = 4
    reboots_per_fault: int = 2
    reboots_per_day: int = 5
    reboots_apart_s: float = 7200.0
    replaces_per_fault: int = 3
    breaker: int = 10  # replacements in a partition that failed, one after the other
    can: frozenset[Remedy] = frozenset({Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE})
    caps: Mapping[str, Remedy] = field(default_factory=dict)  # check -> the most that may be done for it
    off: frozenset[str] = frozenset()  # checks that say nothing
    spares: frozenset[str] = frozenset()
    slurm_users: frozenset[str] = SLURM_USERS  # empty: all drains but ours are somebody's, as a platform's own
    gone_remedy: Remedy = Remedy.REPLACE
    gone_s: float = 0.0  # how long a lost node that is not off for certain may come back by itself; a cloud's: 60
    boot_s: float = 60.0  # from the word to the first report; a cloud's: 1800
    told_s: float = 15.0  # from the word until whoever was told has begun, or never will
    validate_s: float = PHASE_S  # checks, load and the pair test
    removal_s: float = 600.0  # for Slurm to take a node out of its jobs
    person_s: float = 600.0  # for what only a person can mend to be mended, before we say so
    burn_in_s: float = 86400.0  # a spare is validated again so often
    steady_s: tuple[float, ...] = (5.0, 20.0, 80.0, 300.0)  # well again so long, at the first suspicion, the second ...
    relapse_s: float = 600.0  # ... if it was in service for less than this in between
    retry_s: float = 2.0  # after an action that failed; doubled each time
    capacity_s: float = 600.0  # after a replacement that was refused
    doomed: frozenset[str] = frozenset({"xid[79]", "gpu-count"})  # no job goes on on such a node
    passing: frozenset[str] = frozenset({"file-systems", "host-names", "munge", "clock", "disk", "inodes"})  # once they
    # pass again the node is as good as before: a run that has not left it yet need not
    quick_s: float = 10.0  # a job that fails so soon ...
    quick_failures: int = 3  # ... so often ...
    quick_window_s: float = 300.0  # ... within so long

    @classmethod
    def of(
        cls,
        health: Health,
        can: frozenset[Remedy],
        spares: frozenset[str],
        slurm_users: frozenset[str] = SLURM_USERS,
        **times: float,
    ) -> Policy:
        """From the cluster file, and what its target can do."""
        caps = {name: Remedy(check.action) for name, check in health.checks.items() if check.action}
        return cls(
            health.mode, health.max_out, health.per_hour, health.reboots_per_fault, health.reboots_per_day,
            float(health.reboots_apart_s), can=can, caps=caps, spares=spares, slurm_users=slurm_users,
            off=frozenset(name for name, check in health.checks.items() if not check.enabled), **times,  # type: ignore[arg-type]
        )  # fmt: skip

    def remedy(self, fault: NodeFault) -> Remedy:
        """What may be done for it."""
        cap = self.caps.get(fault.check, Remedy.REPLACE)
        return cap if cap < fault.remedy else fault.remedy


# ---- What the controller is told of its cluster by whoever starts it.


class ControllerSite(Protocol):
    """One cluster. Its policy may change while the controller runs: it is asked for again."""

    @property
    def slurm(self) -> SlurmActions: ...

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
