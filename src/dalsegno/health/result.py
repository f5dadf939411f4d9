"""The result of a check. Unknown is neither passed nor failed: nothing is done about it, and it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    PASSED = "passed"
    WARNED = "warned"  # worth a look; a node is never taken from a job for it
    FAILED = "failed"
    UNKNOWN = "unknown"  # the check itself is broken: its tool is missing, hangs, or answers with garbage


class Remedy(Enum):
    """What helps, from the lightest to the heaviest; each one begins where the one before did not help."""

    NONE = "none"
    WATCH = "watch"
    DRAIN = "drain"
    RESET = "reset"  # the GPUs
    REBOOT = "reboot"
    REPLACE = "replace"

    def __lt__(self, other: Remedy) -> bool:
        order = list(Remedy)
        return order.index(self) < order.index(other)


@dataclass(frozen=True)
class Result:
    """`code` tells faults of one check apart: the number of an Xid, say."""

    verdict: Verdict
    text: str
    remedy: Remedy = Remedy.NONE
    code: str = ""


def passed(text: str) -> Result:
    return Result(Verdict.PASSED, text)


def warned(text: str, code: str = "") -> Result:
    return Result(Verdict.WARNED, text, Remedy.WATCH, code)


def failed(text: str, remedy: Remedy, code: str = "") -> Result:
    return Result(Verdict.FAILED, text, remedy, code)


def unknown(text: str) -> Result:
    return Result(Verdict.UNKNOWN, text)
