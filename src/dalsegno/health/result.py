"""The result of a check. Unknown is neither passed nor failed: it is shown, and no action follows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

SERVER_AWAY = "server"  # result code of the check `file-systems` if the file server is the cause, not the node
MAX_REASON = 200  # maximum characters of a drain reason; longer ones make `sinfo -R` unreadable


class Verdict(Enum):
    PASSED = "passed"
    WARNED = "warned"  # the result is shown to people; no action follows
    FAILED = "failed"
    UNKNOWN = "unknown"  # the check itself failed: its tool is missing, hangs, or has no valid output


class Remedy(Enum):
    """The remedies for a fault, from the lightest to the heaviest. Each is tried if the one before did not help."""

    NONE = "none"
    WATCH = "watch"
    DRAIN = "drain"
    RESET = "reset"  # reset the GPUs
    REBOOT = "reboot"
    REPLACE = "replace"

    def __lt__(self, other: Remedy) -> bool:
        order = list(Remedy)
        return order.index(self) < order.index(other)


@dataclass(frozen=True)
class Result:
    """The result of a check. `code` distinguishes faults of one check, such as the number of an Xid."""

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
