"""Why a job waits: Slurm's word for it, what it means, and the next command. Data."""

from __future__ import annotations

from dalsegno.slurm.parse.pending import PendingReason, parse_pending
from dalsegno.why.answer import Verdict

# What it means. {job}: the job's id, {part}: its partition, {user}: its user.
WAITS: dict[PendingReason, tuple[str, str]] = {
    PendingReason.RESOURCES: (
        "it is next in line, and the nodes it needs are busy",
        "squeue -p {part} --states=RUNNING",
    ),
    PendingReason.PRIORITY: ("jobs of higher priority wait before it", "sprio -j {job}"),
    PendingReason.DEPENDENCY: ("it waits for another job to end", "scontrol show job {job} | grep Dependency"),
    PendingReason.DEPENDENCY_NEVER_SATISFIED: (
        "the job it waits for has not ended as it asked, and never will",
        "scancel {job}",
    ),
    PendingReason.BEGIN_TIME: (
        "it may not start before its begin time; a job that was queued again waits so, too",
        "scontrol update jobid={job} starttime=now",
    ),
    PendingReason.JOB_HELD_USER: ("its user holds it", "scontrol release {job}"),
    PendingReason.JOB_HELD_ADMIN: (
        "an administrator holds it, or it has failed to start too often",
        "scontrol release {job}",
    ),
    PendingReason.REQ_NODE_NOT_AVAIL: ("nodes it needs are out of service or reserved", "sinfo -R"),
    PendingReason.NODE_DOWN: ("a node it needs is down", "sinfo -R"),
    PendingReason.PARTITION_DOWN: ("its partition is closed", "scontrol show partition {part}"),
    PendingReason.PARTITION_INACTIVE: ("its partition is switched off", "scontrol show partition {part}"),
    PendingReason.PARTITION_NODE_LIMIT: (
        "it asks for more nodes than its partition gives",
        "scontrol show partition {part}",
    ),
    PendingReason.PARTITION_TIME_LIMIT: (
        "it asks for more time than its partition gives",
        "scontrol show partition {part}",
    ),
    PendingReason.PARTITION_CONFIG: (
        "what it asks for is not what its partition offers",
        "scontrol show partition {part}",
    ),
    PendingReason.LICENSES: ("a licence it needs is in use", "scontrol show licenses"),
    PendingReason.RESERVATION: ("it waits for its reservation to begin", "scontrol show reservation"),
    PendingReason.RESERVATION_DELETED: ("the reservation it asks for is gone", "scancel {job}"),
    PendingReason.INVALID_ACCOUNT: ("its account does not exist", "sacctmgr show associations user={user}"),
    PendingReason.INVALID_QOS: ("its QOS does not exist", "sacctmgr show qos"),
    PendingReason.ASSOC_MAX_JOBS_LIMIT: ("its user runs as many jobs as the account allows", "squeue -u {user}"),
    PendingReason.ASSOC_GRP: ("its account uses as much as it may", "sacctmgr show associations user={user}"),
    PendingReason.ASSOC_MAX: (
        "it asks for more than its account allows one job",
        "sacctmgr show associations user={user}",
    ),
    PendingReason.QOS_MAX_JOBS_PER_USER_LIMIT: ("its user runs as many jobs as the QOS allows", "squeue -u {user}"),
    PendingReason.QOS_GRP: ("all jobs of its QOS together use as much as they may", "sacctmgr show qos"),
    PendingReason.QOS_MAX: ("it asks for more than its QOS allows", "sacctmgr show qos"),
    PendingReason.QOS_MIN: ("it asks for less than its QOS wants", "sacctmgr show qos"),
    PendingReason.QOS_NOT_ALLOWED: ("its QOS may not be used in its partition", "scontrol show partition {part}"),
    PendingReason.BAD_CONSTRAINTS: ("no node has the features it asks for", "sinfo -o '%N %f'"),
    PendingReason.LAUNCH_FAILED: ("it could not be started on a node, and is held", "scontrol release {job}"),
    PendingReason.PROLOG: ("its prolog runs", "sinfo -R"),
    PendingReason.CLEANING: ("its former self is still being cleared away", "squeue -j {job}"),
    PendingReason.JOB_ARRAY_TASK_LIMIT: ("as many tasks of its array run as may at once", "squeue -j {job}"),
    PendingReason.JOB_HOLD_MAX_REQUEUE: ("it was queued again too often, and is held", "scontrol release {job}"),
    PendingReason.SCHED_DEFER: ("Slurm puts off scheduling for a moment", ""),
    PendingReason.NOT_LOOKED_AT: ("Slurm has not looked at it yet", "squeue -j {job}"),
}


def why_it_waits(reason: str, job: str, partition: str, user: str) -> Verdict:
    known = parse_pending(reason)
    if known not in WAITS:
        bare = reason.strip("()")
        said = f"Slurm says `{bare}`" if bare else "Slurm has not said why yet"
        return Verdict(said, f"scontrol show job {job}")
    sentence, command = WAITS[known]
    return Verdict(sentence, command.format(job=job, part=partition, user=user))
