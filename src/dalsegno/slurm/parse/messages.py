"""Classify errors from Slurm's commands, the reasons that its daemons set on nodes, and why jobs are pending."""

from __future__ import annotations

import re
from enum import Enum


class SlurmRefusal(Enum):
    """The reasons why Slurm refuses a job or an operation on a job."""

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


# Slurm may print several messages. The more specific ones come first in this table.
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
    """The reasons why a Slurm command gets no answer from Slurm's daemons."""

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
    """Return all troubles in the output of a Slurm command, the root cause first; empty for any other error."""
    return tuple(dict.fromkeys(trouble for words, trouble in _TROUBLES.items() if words in text))


# Reasons that Slurm's daemons set, from 20.11 to 25.05
_PARTS = ", "  # separator between several reasons, of which the newest comes first
_AWAY = ("not responding", "node unexpectedly rebooted", "none")


class SlurmReason(Enum):
    """The faults for which slurmctld, slurmd and slurmstepd themselves take a node out of service."""

    PROLOG = "prolog"
    EPILOG = "epilog"
    KILL_TASK = "kill-task"
    BATCH = "batch"
    REBOOTED = "rebooted"
    NOT_RESPONDING = "not-responding"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"  # the text differs from Slurm's own, so a person or another program set it


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
    """Return the first of a node's reasons. Return UNKNOWN if one of them is not a text of Slurm itself."""
    found = [_part(part) for part in text.split(_PARTS)]
    return SlurmReason.UNKNOWN if SlurmReason.UNKNOWN in found else found[0]


def is_absence(text: str) -> bool:
    """Return whether a reason is empty or starts with one of Slurm's texts for an absent node."""
    return not text or text.lower().startswith(_AWAY)


def _part(text: str) -> SlurmReason:
    return next((reason for reason, words in _PATTERNS if words.fullmatch(text)), SlurmReason.UNKNOWN)


class PendingReason(Enum):
    """The reasons why a job is pending. A value is one of Slurm's reasons, or the common prefix of several."""

    RESOURCES = "Resources"
    PRIORITY = "Priority"
    DEPENDENCY = "Dependency"
    DEPENDENCY_NEVER_SATISFIED = "DependencyNeverSatisfied"
    BEGIN_TIME = "BeginTime"
    JOB_HELD_USER = "JobHeldUser"
    JOB_HELD_ADMIN = "JobHeldAdmin"
    REQ_NODE_NOT_AVAIL = "ReqNodeNotAvail"
    NODE_DOWN = "NodeDown"
    PARTITION_DOWN = "PartitionDown"
    PARTITION_INACTIVE = "PartitionInactive"
    PARTITION_NODE_LIMIT = "PartitionNodeLimit"
    PARTITION_TIME_LIMIT = "PartitionTimeLimit"
    PARTITION_CONFIG = "PartitionConfig"
    LICENSES = "Licenses"
    RESERVATION = "Reservation"
    RESERVATION_DELETED = "ReservationDeleted"
    INVALID_ACCOUNT = "InvalidAccount"
    INVALID_QOS = "InvalidQOS"
    ASSOC_MAX_JOBS_LIMIT = "AssocMaxJobsLimit"
    ASSOC_GRP = "AssocGrp"
    ASSOC_MAX = "AssocMax"
    QOS_MAX_JOBS_PER_USER_LIMIT = "QOSMaxJobsPerUserLimit"
    QOS_GRP = "QOSGrp"
    QOS_MAX = "QOSMax"
    QOS_MIN = "QOSMin"
    QOS_NOT_ALLOWED = "QOSNotAllowed"
    BAD_CONSTRAINTS = "BadConstraints"
    LAUNCH_FAILED = "launch failed requeued held"
    PROLOG = "Prolog"
    CLEANING = "Cleaning"
    JOB_ARRAY_TASK_LIMIT = "JobArrayTaskLimit"
    JOB_HOLD_MAX_REQUEUE = "JobHoldMaxRequeue"
    SCHED_DEFER = "SchedDefer"
    NOT_LOOKED_AT = "None"
    UNKNOWN = ""

    @property
    def held_back(self) -> bool:
        """Return whether the job would not start now even if its nodes were free."""
        return self in _HELD_BACK


_HELD_BACK = (
    PendingReason.BEGIN_TIME,
    PendingReason.DEPENDENCY,
    PendingReason.JOB_HELD_USER,
    PendingReason.JOB_HELD_ADMIN,
    PendingReason.JOB_ARRAY_TASK_LIMIT,
)


def parse_pending(text: str) -> PendingReason:
    """Return the value with the longest match at the start of the reason: `QOSMaxJobsPerUserLimit` before `QOSMax`."""
    bare = text.strip("()")
    return max((each for each in PendingReason if bare.startswith(each.value)), key=lambda each: len(each.value))
