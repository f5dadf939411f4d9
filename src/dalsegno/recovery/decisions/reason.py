"""Drain reasons, written by the controller (`dalsegno:<action>:<check>[<code>] <text>`), by Slurm or by people."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dalsegno.health import Remedy
from dalsegno.health.result import MAX_REASON
from dalsegno.recovery.decisions.facts import NodeFault
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.messages import SlurmReason, is_absence, parse_reason
from dalsegno.slurm.render import SPARE_REASON

# Nodes that Slurm itself took out of service


CHECK = "slurm"
DRAIN, REBOOT = Remedy.DRAIN, Remedy.REBOOT


@dataclass(frozen=True)
class Rule:
    """The rule for a node that Slurm took out of service for `reason`.

    `remedies` lists the remedy for the first time in a day, for the second time, and so on. After the last one, an
    administrator is needed.
    """

    reason: SlurmReason
    remedies: tuple[Remedy, ...]

    @property
    def code(self) -> str:
        return self.reason.value


# After a failed prolog or epilog, the node is only validated: if the script fails again although all checks pass, the
# script itself is broken. A reboot can remove processes that cannot be killed and bring back missing hardware.
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
    """Return the rule for a node that Slurm took out of service; None for any other node."""
    out = node.draining or node.down or NodeFlag.INVALID_REG in node.flags
    return RULES.get(parse_reason(node.reason)) if out and node.reason_user in slurm_users else None


def fault_of_drain(node: NodeInfo, rule: Rule, times: int) -> NodeFault | None:
    """Return the fault of a node that Slurm has drained; None if the node needs an administrator.

    `times` is how often Slurm has drained the node for this reason before, within a day.
    """
    return NodeFault(CHECK, rule.remedies[times], node.reason, rule.code) if times < len(rule.remedies) else None


# Reasons that the controller writes


_OURS = re.compile(r"dalsegno:(drain|reset|reboot|replace):([a-z][a-z0-9_-]*)(?:\[([^\]]*)\])?(?: (.*))?")
# The users under which slurmctld, slurmd and slurmstepd write reasons.
SLURM_USERS = frozenset({"root", "slurm"})
# Reasons that are orders to HyperPod's agent, written by our target, by HyperPod itself or by a person.
ORDERS = frozenset({"Action:Replace", "Action:Reboot"})


class Owner(Enum):
    """The party that keeps a node out of service."""

    NOBODY = "nobody"  # the node is in service, or down only because it does not respond
    US = "us"
    SPARE = "spare"
    SLURM = "slurm"  # slurmctld or slurmd, because of a fault that it detected
    PLATFORM = "platform"  # the platform replaces or reboots the machine, because someone has ordered it
    SOMEONE = "someone else"


def write_reason(fault: NodeFault) -> str:
    code = f"[{fault.code}]" if fault.code else ""
    return f"dalsegno:{fault.remedy.value}:{fault.check}{code} {fault.text}".strip()[:MAX_REASON]


def read_reason(reason: str) -> NodeFault | None:
    """Parse a reason written by the controller; None for any other."""
    found = _OURS.fullmatch(reason)
    if not found:
        return None
    return NodeFault(found[2], Remedy(found[1]), found[4] or "", found[3] or "")


def describe_reason(reason: str) -> str:
    """Return a reason as text for people. A reason that Dal Segno did not write is returned unchanged."""
    if reason == SPARE_REASON:
        return "kept as a spare"
    fault = read_reason(reason)
    if fault is None:
        return reason
    what = fault.text or f"{fault.check}{f' {fault.code}' if fault.code else ''}"
    return what if fault.remedy is Remedy.DRAIN else f"{what} (remedy: {fault.remedy.value})"


def slurm_users_of(answer: Mapping[str, Any]) -> frozenset[str]:
    """Return the users of Slurm's daemons as the controller reports them."""
    return frozenset(map(str, answer.get("slurm_users", SLURM_USERS)))


def find_owner(node: NodeInfo, slurm_users: Collection[str]) -> Owner:
    if read_reason(node.reason):
        return Owner.US if node.draining or node.down else Owner.NOBODY
    if node.reason == SPARE_REASON:
        return Owner.SPARE if node.draining else Owner.NOBODY
    if node.reason in ORDERS:
        return Owner.PLATFORM if node.draining or node.down or NodeFlag.FAIL in node.flags else Owner.NOBODY
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


# Topics of remarks: code compares these, and never reads the text


class Topic(Enum):
    """The topics of remarks that decisions depend on."""

    OTHER = ""
    AGENT_SILENT = "agent-silent"
    AGENT_DEAD = "agent-dead"
    QUICK_FAILURES = "quick-failures"
    CORRUPTION = "corruption"  # a user's run reports that the node computes wrongly
    SLURM_DRAIN = "slurm-drain"  # Slurm itself took the node out of service
    HELD_BACK = "held-back"  # an action that is not carried out: recovery is paused, or only observes
    NO_ROOM = "no-room"  # a fault on which recovery does not act, because a limit is reached
    KEPT_OUT = "kept-out"  # a fault of a node that an administrator keeps out of service

    @classmethod
    def _missing_(cls, value: object) -> Topic:
        return cls.OTHER


@dataclass(frozen=True)
class Subject:
    """The topic of a remark, and the details that tell two remarks on the same topic apart.

    A remark with the same subject as the last one is not repeated, even if numbers in its text change.
    """

    topic: Topic = Topic.OTHER
    network: bool = False  # whether the last report has a network warning
    count: int = 0  # number of failed jobs
    action: str = ""  # kind of the action that is held back
    fault: str = ""  # key of the fault
    jobs: tuple[int, ...] = ()  # jobs that the held-back action concerns


ANYTHING = Subject()
