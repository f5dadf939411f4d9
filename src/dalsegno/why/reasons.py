"""Why a job waits: Slurm's word for it, what it means, and the next command. Data."""

from __future__ import annotations

from dalsegno.why.answer import Verdict

# Slurm's word, or its beginning -> what it means. {job}: the job's id, {part}: its partition, {user}: its user.
WAITS: dict[str, tuple[str, str]] = {
    "Resources": ("it is next in line, and the nodes it needs are busy", "squeue -p {part} --states=RUNNING"),
    "Priority": ("jobs of higher priority wait before it", "sprio -j {job}"),
    "Dependency": ("it waits for another job to end", "scontrol show job {job} | grep Dependency"),
    "DependencyNeverSatisfied": ("the job it waits for has not ended as it asked, and never will", "scancel {job}"),
    "BeginTime": ("it may not start before its begin time; a job that was queued again waits so, too",
                  "scontrol update jobid={job} starttime=now"),
    "JobHeldUser": ("its user holds it", "scontrol release {job}"),
    "JobHeldAdmin": ("an administrator holds it, or it has failed to start too often", "scontrol release {job}"),
    "ReqNodeNotAvail": ("nodes it needs are out of service or reserved", "sinfo -R"),
    "NodeDown": ("a node it needs is down", "sinfo -R"),
    "PartitionDown": ("its partition is closed", "scontrol show partition {part}"),
    "PartitionInactive": ("its partition is switched off", "scontrol show partition {part}"),
    "PartitionNodeLimit": ("it asks for more nodes than its partition gives", "scontrol show partition {part}"),
    "PartitionTimeLimit": ("it asks for more time than its partition gives", "scontrol show partition {part}"),
    "PartitionConfig": ("what it asks for is not what its partition offers", "scontrol show partition {part}"),
    "Licenses": ("a licence it needs is in use", "scontrol show licenses"),
    "Reservation": ("it waits for its reservation to begin", "scontrol show reservation"),
    "ReservationDeleted": ("the reservation it asks for is gone", "scancel {job}"),
    "InvalidAccount": ("its account does not exist", "sacctmgr show associations user={user}"),
    "InvalidQOS": ("its QOS does not exist", "sacctmgr show qos"),
    "AssocMaxJobsLimit": ("its user runs as many jobs as the account allows", "squeue -u {user}"),
    "AssocGrp": ("its account uses as much as it may", "sacctmgr show associations user={user}"),
    "AssocMax": ("it asks for more than its account allows one job", "sacctmgr show associations user={user}"),
    "QOSMaxJobsPerUserLimit": ("its user runs as many jobs as the QOS allows", "squeue -u {user}"),
    "QOSGrp": ("all jobs of its QOS together use as much as they may", "sacctmgr show qos"),
    "QOSMax": ("it asks for more than its QOS allows", "sacctmgr show qos"),
    "QOSMin": ("it asks for less than its QOS wants", "sacctmgr show qos"),
    "QOSNotAllowed": ("its QOS may not be used in its partition", "scontrol show partition {part}"),
    "BadConstraints": ("no node has the features it asks for", "sinfo -o '%N %f'"),
    "launch failed requeued held": ("it could not be started on a node, and is held", "scontrol release {job}"),
    "Prolog": ("its prolog runs", "sinfo -R"),
    "Cleaning": ("its former self is still being cleared away", "squeue -j {job}"),
    "JobArrayTaskLimit": ("as many tasks of its array run as may at once", "squeue -j {job}"),
    "JobHoldMaxRequeue": ("it was queued again too often, and is held", "scontrol release {job}"),
    "SchedDefer": ("Slurm puts off scheduling for a moment", ""),
    "None": ("Slurm has not looked at it yet", "squeue -j {job}"),
}  # fmt: skip


def why_it_waits(reason: str, job: str, partition: str, user: str) -> Verdict:
    """The longest word that the reason begins with counts: `QOSMaxJobsPerUserLimit` before `QOSMax`."""
    bare = reason.strip("()")
    known = [word for word in WAITS if bare.startswith(word)]
    if not known:
        said = f"Slurm says `{bare}`" if bare else "Slurm has not said why yet"
        return Verdict(said, f"scontrol show job {job}")
    sentence, command = WAITS[max(known, key=len)]
    return Verdict(sentence, command.format(job=job, part=partition, user=user))
