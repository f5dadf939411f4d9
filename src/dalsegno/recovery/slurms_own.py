"""Nodes that Slurm itself has taken out of service for a fault it met there, and what is done for them, as data. Pure.

Two things tell them from what a person has drained: the words, which are Slurm's own to the letter, and the user under
whom its daemons write. What a person writes, in whatever words, is never touched.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from dalsegno.health import Remedy
from dalsegno.recovery.fault import Fault
from dalsegno.slurm import NodeFlag, NodeInfo

CHECK = "slurm"
TAKEN_OUT = "Slurm has taken it out of service"  # how what is said of such a node begins
DRAIN, REBOOT = Remedy.DRAIN, Remedy.REBOOT


@dataclass(frozen=True)
class Rule:
    """`remedies`: what is done the first time in a day, the second, and so on; after the last, a person is needed."""

    code: str
    words: re.Pattern[str]
    remedies: tuple[Remedy, ...]


def _rule(code: str, words: str, *remedies: Remedy) -> Rule:
    return Rule(code, re.compile(words, re.IGNORECASE), remedies)


# As slurmctld and slurmstepd write them, 20.11 to 25.05. A prolog that fails again although all checks pass is broken
# itself; processes that cannot be killed, and hardware that has gone missing, may be there again after a boot.
RULES = (
    _rule("prolog", r"prolog error", DRAIN, DRAIN),
    _rule("epilog", r"epilog error", DRAIN, DRAIN),
    _rule("kill-task", r"kill task failed", DRAIN, REBOOT),
    _rule("batch", r"batch job complete failure", DRAIN, REBOOT),
    _rule("rebooted", r"node unexpectedly rebooted", DRAIN, DRAIN),
    _rule("not-responding", r"not responding", DRAIN, REBOOT),
    _rule("hardware", r"low (?:realmemory|tmpdisk|cpus|socket\*core\*thread count|socket\*core count)(?: \(.*\))?",
          DRAIN, REBOOT),
    _rule("hardware", r"gres/\S+ count (?:reported lower than configured|too low) \(\d+ < \d+\)", DRAIN, REBOOT),
)  # fmt: skip


def rule_of(node: NodeInfo, slurm_users: Collection[str]) -> Rule | None:
    """The rule for a node that Slurm took out of service; None for one that is in service, or a person's."""
    out = node.draining or node.down or NodeFlag.INVALID_REG in node.flags
    if not out or node.reason_user not in slurm_users:
        return None
    found = [next((rule for rule in RULES if rule.words.fullmatch(part)), None) for part in node.reason.split(", ")]
    return found[0] if all(found) else None


def fault_of_drain(node: NodeInfo, rule: Rule, times: int) -> Fault | None:
    """What is wrong by Slurm's word, where it said so that many times today before; None if a person is needed."""
    return Fault(CHECK, rule.remedies[times], node.reason, rule.code) if times < len(rule.remedies) else None
