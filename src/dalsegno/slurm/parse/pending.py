"""Parse why a job is pending from squeue's REASON column."""

from __future__ import annotations

from enum import Enum


class PendingReason(Enum):
    """Slurm's reasons, or the common prefix of several."""

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
        """Whether the job would not start now even if its nodes were free."""
        return self in _HELD_BACK


_HELD_BACK = (
    PendingReason.BEGIN_TIME,
    PendingReason.DEPENDENCY,
    PendingReason.JOB_HELD_USER,
    PendingReason.JOB_HELD_ADMIN,
    PendingReason.JOB_ARRAY_TASK_LIMIT,
)


def parse_pending(text: str) -> PendingReason:
    """Return the longest match at the start of the reason: `QOSMaxJobsPerUserLimit` before `QOSMax`."""
    bare = text.strip("()")
    return max((each for each in PendingReason if bare.startswith(each.value)), key=lambda each: len(each.value))
