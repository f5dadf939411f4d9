"""The recovery policy: what recovery may do, how often, and how long it waits. The values come from the cluster file
and the target."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dalsegno.health import Remedy
from dalsegno.health.settings import PHASE_S
from dalsegno.recovery.act import SlurmActions
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.recovery.decisions.reason import SLURM_USERS
from dalsegno.spec.facts import Health
from dalsegno.wire.cloud_notice import CHECK as CLOUD_NOTICE

AUTO, OBSERVE, OFF = "auto", "observe", "off"


@dataclass(frozen=True)
class Policy:
    """The recovery policy. Times are in seconds. `can` are the remedies that the target supports."""

    mode: str = AUTO
    max_out: float = 0.25
    per_hour: int = 4
    reboots_per_fault: int = 2
    reboots_per_day: int = 5
    reboots_apart_s: float = 7200.0
    replaces_per_fault: int = 3
    breaker: int = 10  # no more replacements in a partition after this many failed in a row
    can: frozenset[Remedy] = frozenset({Remedy.RESET, Remedy.REBOOT, Remedy.REPLACE})
    caps: Mapping[str, Remedy] = field(default_factory=dict)  # check -> the heaviest remedy allowed for it
    off: frozenset[str] = frozenset()  # disabled checks
    on: frozenset[str] = frozenset()  # checks that the cluster file enables by name
    spares: frozenset[str] = frozenset()
    # Nodes whose machine only a person can replace, with a description of the machine. A spare stands in for them.
    machines: Mapping[str, str] = field(default_factory=dict)
    platform_returns: bool = False  # whether the platform itself returns nodes to service after it has repaired them
    armed: frozenset[str] = frozenset()  # partitions in which recovery acts even if the mode is observe
    agents: bool = True  # whether the cluster has node agents; without them, no node can be validated and returned
    slurm_users: frozenset[str] = SLURM_USERS  # drains by these users are Slurm's own, not an administrator's
    gone_remedy: Remedy = Remedy.REPLACE
    gone_s: float = 0.0  # how long to wait for the return of a lost node that may still be on; 60 on clouds
    boot_s: float = 60.0  # time limit from the order to boot to the agent's first report; 1800 on clouds
    begin_s: float = 15.0  # a target starts a reboot or replacement within this time, or not at all
    validate_s: float = PHASE_S  # time limit for checks, load test and pair test
    removal_s: float = 600.0  # time limit for Slurm to remove a node from its jobs
    absent_s: float = 3600.0  # time limit for the return of an instance that the cloud ended; then `needs admin`
    person_s: float = 600.0  # how long an administrator has to repair a fault; then the node is in phase `needs admin`
    burn_in_s: float = 86400.0  # interval between two validations of a spare
    # The time without faults that ends a suspicion: the first one, the second one in a row, and so on.
    steady_s: tuple[float, ...] = (5.0, 20.0, 80.0, 300.0)
    relapse_s: float = 600.0  # a suspicion this soon after the return to service is a relapse
    retry_s: float = 2.0  # delay after a failed action, doubled each time
    capacity_s: float = 600.0  # delay after a failed replacement
    job_ending: frozenset[str] = frozenset({"xid[79]", "gpu-count"})  # faults with which no job can continue
    # Faults that leave no damage: once the check passes again, runs that are still on the node can stay.
    passing: frozenset[str] = frozenset(
        {"file-systems", "host-names", "munge", "clock", "disk", "inodes", CLOUD_NOTICE}
    )
    quick_s: float = 10.0  # a job that fails within this time of its start is a quick failure
    quick_failures: int = 3  # a node is faulty after this many quick failures within `quick_window_s`
    quick_window_s: float = 300.0  # time window in which quick failures are counted

    @classmethod
    def of(
        cls,
        health: Health,
        can: frozenset[Remedy],
        spares: frozenset[str],
        slurm_users: frozenset[str] = SLURM_USERS,
        machines: Mapping[str, str] | None = None,
        platform_returns: bool = False,
        **times: float,
    ) -> Policy:
        """Build the policy from the cluster file and what its target supports."""
        caps = {name: Remedy(check.action) for name, check in health.checks.items() if check.action}
        return cls(
            health.mode, health.max_out, health.per_hour, health.reboots_per_fault, health.reboots_per_day,
            float(health.reboots_apart_s), can=can, caps=caps, spares=spares, slurm_users=slurm_users,
            machines=machines or {}, platform_returns=platform_returns,
            armed=frozenset(health.armed),
            on=frozenset(name for name, check in health.checks.items() if check.enabled),
            off=frozenset(name for name, check in health.checks.items() if not check.enabled), **times,  # type: ignore[arg-type]
        )  # fmt: skip

    def observes(self, partitions: Collection[str]) -> bool:
        """Return whether recovery does not act on a node in these partitions, but only observes it.

        In mode `observe`, recovery acts only if all of these partitions are armed.
        """
        armed = self.mode == OBSERVE and bool(partitions) and self.armed.issuperset(partitions)
        return self.mode != AUTO and not armed

    def remedy(self, fault: NodeFault) -> Remedy:
        """Return the remedy for a fault, limited by the cluster file."""
        cap = self.caps.get(fault.check, Remedy.REPLACE)
        return cap if cap < fault.remedy else fault.remedy


class ControllerSite(Protocol):
    """The controller's interface to its cluster. It reads the policy every round, because the policy may change."""

    @property
    def slurm(self) -> SlurmActions: ...

    @property
    def target(self) -> object:
        """The target. Its type determines whether it can reset, reboot and replace nodes."""
        ...

    @property
    def slurm_users(self) -> frozenset[str]:
        """The users under which Slurm's daemons take nodes out of service."""
        ...

    def policy(self) -> Policy: ...

    def is_being_changed(self) -> bool:
        """Return whether `up` or `down` is running. Their changes to nodes are not faults."""
        ...
