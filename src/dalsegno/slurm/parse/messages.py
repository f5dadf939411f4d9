"""Classify the error messages of Slurm's commands and the reasons that its daemons set on nodes."""

from __future__ import annotations

import re
from enum import Enum


class SlurmRefusal(Enum):
    """Why Slurm refused a job or an operation on it."""

    MEMORY = "memory"
    FEATURE = "feature"
    NODE_NAME = "node-name"
    ACCOUNT = "account"
    QOS = "qos"
    TIME_LIMIT = "time-limit"
    POLICY = "policy"
    NO_SUCH_NODES = "no-such-nodes"  # no node can ever satisfy the request
    REQUEUE_DISABLED = "requeue-disabled"  # the job was submitted with --no-requeue
    UNKNOWN = "unknown"


# Slurm may print several messages: the more specific ones come first.
_REFUSALS = {
    "Memory specification": SlurmRefusal.MEMORY,
    "Invalid feature": SlurmRefusal.FEATURE,
    "Invalid node name": SlurmRefusal.NODE_NAME,
    "Invalid account": SlurmRefusal.ACCOUNT,
    "Invalid qos": SlurmRefusal.QOS,
    "Requested time limit": SlurmRefusal.TIME_LIMIT,
    "QOS policy": SlurmRefusal.POLICY,
    "node configuration": SlurmRefusal.NO_SUCH_NODES,
    "Requested operation is presently disabled": SlurmRefusal.REQUEUE_DISABLED,
}


def parse_refusal(text: str) -> SlurmRefusal:
    """Return the most specific refusal in the output of a Slurm command."""
    return next((refusal for words, refusal in _REFUSALS.items() if words in text), SlurmRefusal.UNKNOWN)


class SlurmTrouble(Enum):
    """Why a Slurm command got no answer from its daemons."""

    NO_SETTINGS = "no-settings"  # the command found no slurm.conf
    NO_CONTROLLER = "no-controller"
    DISCONNECTED = "disconnected"
    NO_CONNECTION = "no-connection"
    NO_DATABASE = "no-database"
    NO_ACCOUNTING = "no-accounting"
    AUTHENTICATION = "authentication"


_TROUBLES = {
    "configuration source": SlurmTrouble.NO_SETTINGS,
    "fetch_config": SlurmTrouble.NO_SETTINGS,
    "slurm.conf: No such file": SlurmTrouble.NO_SETTINGS,
    "Unable to contact slurm controller": SlurmTrouble.NO_CONTROLLER,
    "Zero Bytes were transmitted": SlurmTrouble.DISCONNECTED,
    "connect failure": SlurmTrouble.NO_CONNECTION,
    "Connection refused": SlurmTrouble.NO_DATABASE,
    "accounting storage is disabled": SlurmTrouble.NO_ACCOUNTING,
    "authentication": SlurmTrouble.AUTHENTICATION,
    "Invalid credential": SlurmTrouble.AUTHENTICATION,
}


def parse_troubles(text: str) -> tuple[SlurmTrouble, ...]:
    """Return all troubles in the output of a Slurm command, the root cause first; () for any other error."""
    return tuple(dict.fromkeys(trouble for words, trouble in _TROUBLES.items() if words in text))


# Reasons that Slurm's own daemons set, from 20.11 to 25.05
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
    UNKNOWN = "unknown"  # not exactly Slurm's text: set by a person


_REASONS = (
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
_PATTERNS = tuple((reason, re.compile(words, re.IGNORECASE)) for reason, words in _REASONS)


def parse_reason(text: str) -> SlurmReason:
    """Return the first reason of a node's `Reason=`; UNKNOWN if any part of it is not Slurm's own."""
    found = [_part(part) for part in text.split(_PARTS)]
    return SlurmReason.UNKNOWN if SlurmReason.UNKNOWN in found else found[0]


def is_absence(text: str) -> bool:
    """Return whether a reason says only that the node was absent. An empty reason counts too."""
    return not text or text.lower().startswith(_AWAY)


def _part(text: str) -> SlurmReason:
    return next((reason for reason, words in _PATTERNS if words.fullmatch(text)), SlurmReason.UNKNOWN)
