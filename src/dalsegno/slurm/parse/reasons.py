"""Why a node is out of service, in the words that Slurm's own daemons write, from 20.11 to 25.05."""

from __future__ import annotations

import re
from enum import Enum

_PARTS = ", "  # several reasons, the newest first
_AWAY = ("not responding", "node unexpectedly rebooted", "none")


class SlurmReason(Enum):
    """The faults for which slurmctld, slurmd and slurmstepd take a node out of service by themselves."""

    PROLOG = "prolog"
    EPILOG = "epilog"
    KILL_TASK = "kill-task"
    BATCH = "batch"
    REBOOTED = "rebooted"
    NOT_RESPONDING = "not-responding"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"  # words that are not Slurm's to the letter: a person's


_WORDS = (
    (SlurmReason.PROLOG, r"prolog error"),
    (SlurmReason.EPILOG, r"epilog error"),
    (SlurmReason.KILL_TASK, r"kill task failed"),
    (SlurmReason.BATCH, r"batch job complete failure"),
    (SlurmReason.REBOOTED, r"node unexpectedly rebooted"),
    (SlurmReason.NOT_RESPONDING, r"not responding"),
    (
        SlurmReason.HARDWARE,
        r"low (?:realmemory|tmpdisk|cpus|socket\*core\*thread count|socket\*core count)(?: \(.*\))?",
    ),
    (SlurmReason.HARDWARE, r"gres/\S+ count (?:reported lower than configured|too low) \(\d+ < \d+\)"),
)
_PATTERNS = tuple((reason, re.compile(words, re.IGNORECASE)) for reason, words in _WORDS)


def parse_reason(text: str) -> SlurmReason:
    """Return the first reason of a node's `Reason=`; UNKNOWN where any part of it is not Slurm's own."""
    found = [_part(part) for part in text.split(_PARTS)]
    return SlurmReason.UNKNOWN if SlurmReason.UNKNOWN in found else found[0]


def is_absence(text: str) -> bool:
    """Whether a reason says only that the node was away; there may be none at all."""
    return not text or text.lower().startswith(_AWAY)


def _part(text: str) -> SlurmReason:
    return next((reason for reason, words in _PATTERNS if words.fullmatch(text)), SlurmReason.UNKNOWN)
