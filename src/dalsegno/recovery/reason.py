"""The reasons we give Slurm: `dalsegno:<action>:<check>[<code>] <text>`. Whoever reads them knows whose they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dalsegno.health import Remedy
from dalsegno.recovery.facts import NodeFault
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.messages import SlurmReason, is_absence, parse_reason
from dalsegno.slurm.render import SPARE_REASON

# ---- Nodes that Slurm itself has taken out of service for a fault it met there, and what is done for them, as
# data. Pure.


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


def fault_of_drain(node: NodeInfo, rule: Rule, times: int) -> NodeFault | None:
    """What is wrong by Slurm's word, where it said so that many times today before; None if a person is needed."""
    return NodeFault(CHECK, rule.remedies[times], node.reason, rule.code) if times < len(rule.remedies) else None


# ---- The reasons we give Slurm: `dalsegno:<action>:<check>[<code>] <text>`. Whoever reads them knows whose they
# are.


LONGEST = 200  # more makes `sinfo -R` unreadable
_OURS = re.compile(r"dalsegno:(drain|reset|reboot|replace):([a-z][a-z0-9_-]*)(?:\[([^\]]*)\])?(?: (.*))?")
# Under whom slurmctld, slurmd and slurmstepd write reasons.
SLURM_USERS = frozenset({"root", "slurm"})


class Owner(Enum):
    """Who keeps a node out of service."""

    NOBODY = "nobody"  # it is in service, or away
    US = "us"
    SPARE = "spare"
    SLURM = "slurm"  # by itself, for a fault it met there
    SOMEONE = "someone else"


def write_reason(fault: NodeFault) -> str:
    code = f"[{fault.code}]" if fault.code else ""
    return f"dalsegno:{fault.remedy.value}:{fault.check}{code} {fault.text}".strip()[:LONGEST]


def read_reason(reason: str) -> NodeFault | None:
    """The fault in a reason of ours; None in any other."""
    found = _OURS.fullmatch(reason)
    if not found:
        return None
    return NodeFault(found[2], Remedy(found[1]), found[4] or "", found[3] or "")


def slurm_users_of(told: Mapping[str, Any]) -> frozenset[str]:
    """Under whom Slurm itself writes, by a controller's answer; without root it is whoever runs the cluster."""
    return frozenset(map(str, told.get("slurm_users", SLURM_USERS)))


def owner(node: NodeInfo, slurm_users: Collection[str]) -> Owner:
    if read_reason(node.reason):
        return Owner.US if node.draining or node.down else Owner.NOBODY
    if node.reason == SPARE_REASON:
        return Owner.SPARE if node.draining else Owner.NOBODY
    if rule_of(node, slurm_users):
        return Owner.SLURM
    if node.down and not node.draining and is_absence(node.reason):
        return Owner.NOBODY
    return Owner.SOMEONE if node.draining or node.down or node.flags & _TAKEN else Owner.NOBODY


_TAKEN = {
    NodeFlag.FAIL,
    NodeFlag.INVALID_REG,
    NodeFlag.MAINTENANCE,
    NodeFlag.POWER_DOWN,
    NodeFlag.POWERED_DOWN,
    NodeFlag.POWERING_DOWN,
    NodeFlag.POWERING_UP,
    NodeFlag.REBOOT_ISSUED,
    NodeFlag.REBOOT_REQUESTED,
}


# ---- What a remark about a node is about, so that nobody has to read its text.


class Topic(Enum):
    """The subjects of remarks that something depends on."""

    OTHER = ""
    AGENT_SILENT = "agent-silent"
    AGENT_DEAD = "agent-dead"
    QUICK_FAILURES = "quick-failures"
    SLURM_DRAIN = "slurm-drain"  # Slurm itself has taken the node out of service

    @classmethod
    def _missing_(cls, value: object) -> Topic:
        return cls.OTHER


@dataclass(frozen=True)
class Subject:
    """One remark's topic, and what tells two remarks on the same topic apart."""

    topic: Topic = Topic.OTHER
    network: bool = False  # the last report warned of the network
    count: int = 0  # of jobs that failed


ANYTHING = Subject()
SLURM_DRAIN = Subject(Topic.SLURM_DRAIN)
