"""The reasons we give Slurm: `dalsegno:<action>:<check>[<code>] <text>`. Whoever reads them knows whose they are."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from dalsegno.health import Remedy
from dalsegno.recovery.fault import Fault
from dalsegno.recovery.slurms_own import rule_of
from dalsegno.slurm.facts import NodeFlag, NodeInfo
from dalsegno.slurm.parse.messages import is_absence
from dalsegno.slurm.render import SPARE_REASON

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


def write_reason(fault: Fault) -> str:
    code = f"[{fault.code}]" if fault.code else ""
    return f"dalsegno:{fault.remedy.value}:{fault.check}{code} {fault.text}".strip()[:LONGEST]


def read_reason(reason: str) -> Fault | None:
    """The fault in a reason of ours; None in any other."""
    found = _OURS.fullmatch(reason)
    if not found:
        return None
    return Fault(found[2], Remedy(found[1]), found[4] or "", found[3] or "")


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
