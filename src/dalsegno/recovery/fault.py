"""What is wrong with a node, as one value: the heaviest of what its checks found, or that it is gone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dalsegno.health import Finding, Remedy, Verdict

GONE, BLACK_HOLE, PASSPORT, VALIDATION, BOOT = "gone", "black-hole", "passport", "validation", "boot"
SLURMD = "slurmd"  # the check of that name


@dataclass(frozen=True)
class Fault:
    """`remedy` is what helps, by what is known so far."""

    check: str
    remedy: Remedy
    text: str
    code: str = ""
    gone: bool = False

    @property
    def key(self) -> str:
        return f"{self.check}[{self.code}]" if self.code else self.check

    @property
    def words(self) -> str:
        """`disk: / is 97 % full`"""
        return f"{self.key}: {self.text}"


def fault_of(finding: Finding) -> Fault:
    result = finding.result
    return Fault(finding.check, result.remedy, result.text, result.code)


def failures(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """What failed. Unknown is not failed, and for a warning no node is taken."""
    return tuple(each for each in findings if each.result.verdict is Verdict.FAILED)


def heaviest(faults: Iterable[Fault]) -> Fault | None:
    """The first of those that need most."""
    worst: Fault | None = None
    for fault in faults:
        if worst is None or worst.remedy < fault.remedy:
            worst = fault
    return worst
