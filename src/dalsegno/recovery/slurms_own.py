"""Nodes that Slurm itself has taken out of service for a fault it met there, and what is done for them, as data. Pure.

Two things tell them from what a person has drained: the words, which are Slurm's own to the letter, and the user under
whom its daemons write. What a person writes, in whatever words, is never touched.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dalsegno.health import Remedy
from dalsegno.recovery.fault import Fault
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.messages import SlurmReason, parse_reason

CHECK = "slurm"
DRAIN, REBOOT = Remedy.DRAIN, Remedy.REBOOT


@dataclass(frozen=True)
class Rule:
    """`remedies`: what is done the first time in a day, the second, and so on; after the last, a person is needed."""

    reason: SlurmReason
    remedies: tuple[Remedy, ...]

    @property
    def code(self) -> str:
        return self.reason.value


# A prolog that fails again although all checks pass is broken itself; processes that cannot be killed, and hardware
# that has gone missing, may be there again after a boot.
RULES = {
    reason: Rule(reason, remedies)
    for reason, remedies in {
        SlurmReason.PROLOG: (DRAIN, DRAIN),
        SlurmReason.EPILOG: (DRAIN, DRAIN),
        SlurmReason.KILL_TASK: (DRAIN, REBOOT),
        SlurmReason.BATCH: (DRAIN, REBOOT),
        SlurmReason.REBOOTED: (DRAIN, DRAIN),
        SlurmReason.NOT_RESPONDING: (DRAIN, REBOOT),
        SlurmReason.HARDWARE: (DRAIN, REBOOT),
    }.items()
}


def rule_of(node: NodeInfo, slurm_users: Collection[str]) -> Rule | None:
    """Return the rule for a node that Slurm took out of service; None for one that is in service, or a person's."""
    out = node.draining or node.down or NodeFlag.INVALID_REG in node.flags
    return RULES.get(parse_reason(node.reason)) if out and node.reason_user in slurm_users else None


def fault_of_drain(node: NodeInfo, rule: Rule, times: int) -> Fault | None:
    """What is wrong by Slurm's word, where it said so that many times today before; None if a person is needed."""
    return Fault(CHECK, rule.remedies[times], node.reason, rule.code) if times < len(rule.remedies) else None
