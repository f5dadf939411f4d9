"""`squeue`: the jobs Slurm has in hand."""

from __future__ import annotations

from dalsegno.slurm.job_info import JobInfo
from dalsegno.slurm.parse.jobs import array_task, node_names, unix_status
from dalsegno.slurm.parse.text import (
    duration_s,
    epoch,
    integer,
    known,
    long_format,
    malformed,
    optional_integer,
    records,
)
from dalsegno.slurm.parse.tres import gpus_in_tres, memory_mib, parse_tres
from dalsegno.slurm.states import parse_job_state

# What users write comes last.
_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "HetJobOffset",
    "UserName",
    "Account",
    "QOS",
    "Partition",
    "State",
    "Reason",
    "NodeList",
    "NumNodes",
    "NumCPUs",
    "tres-alloc",
    "PriorityLong",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "TimeUsed",
    "TimeLimit",
    "exit_code",
    "RestartCnt",
    "Reservation",
    "BatchHost",
    "Name",
    "Comment",
)

JOBS_ARGV = ("squeue", "--all", "--noheader", "--Format", long_format(_FIELDS))


def parse_jobs(text: str) -> list[JobInfo]:
    """The answer to JOBS_ARGV."""
    return [_job(dict(zip(_FIELDS, row, strict=True))) for row in records("squeue", text, len(_FIELDS))]


def _job(facts: dict[str, str]) -> JobInfo:
    job_id = optional_integer(facts["JobID"])
    if job_id is None:
        raise malformed("squeue", facts["JobID"])
    task = array_task(facts["ArrayTaskID"])
    tres = facts["tres-alloc"]
    code, signal = unix_status(facts["exit_code"])
    return JobInfo(
        id=job_id,
        name=facts["Name"],
        user=facts["UserName"],
        state=parse_job_state(facts["State"]),
        account=known(facts["Account"]),
        qos=known(facts["QOS"]),
        partition=facts["Partition"],
        reason=known(facts["Reason"]),
        nodes=node_names("squeue", facts["NodeList"]),
        node_count=integer(facts["NumNodes"]),
        cpus=integer(facts["NumCPUs"]),
        gpus=gpus_in_tres(tres),
        memory_mib=memory_mib(parse_tres(tres).get("mem", "")),
        priority=integer(facts["PriorityLong"]),
        array_id=optional_integer(facts["ArrayJobID"]) if task else None,
        array_task=task,
        het_id=optional_integer(facts["HetJobID"]),
        het_offset=optional_integer(facts["HetJobOffset"]),
        submitted_at=epoch(facts["SubmitTime"]),
        started_at=epoch(facts["StartTime"]),
        ends_at=epoch(facts["EndTime"]),
        elapsed_s=duration_s(facts["TimeUsed"]) or 0,
        time_limit_s=duration_s(facts["TimeLimit"]),
        exit_code=code,
        exit_signal=signal,
        restarts=integer(facts["RestartCnt"]),
        reservation=known(facts["Reservation"]),
        batch_host=known(facts["BatchHost"]),
        comment=known(facts["Comment"]),
    )
