"""`squeue`: the jobs Slurm has in hand."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dalsegno.slurm.hostlist import HostlistError, expand
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
from dalsegno.slurm.states import JobState, parse_job_state

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


@dataclass(frozen=True)
class JobInfo:
    """A job as Slurm sees it. Times are seconds since 1970; of a job that waits, `gpus` and `cpus` are what it asks."""

    id: int
    name: str
    user: str
    state: JobState
    account: str = ""
    qos: str = ""
    partition: str = ""
    reason: str = ""
    nodes: tuple[str, ...] = ()
    node_count: int = 0
    cpus: int = 0
    gpus: int = 0
    memory_mib: int = 0
    priority: int = 0
    array_id: int | None = None
    array_task: str = ""  # "3", or "4-9" for those that have not started
    het_id: int | None = None
    het_offset: int | None = None
    submitted_at: int | None = None
    started_at: int | None = None  # expected, while it waits
    ends_at: int | None = None
    elapsed_s: int = 0
    time_limit_s: int | None = None  # None: no limit
    exit_code: int = 0
    exit_signal: int = 0
    restarts: int = 0
    reservation: str = ""
    batch_host: str = ""
    comment: str = ""


def parse_jobs(text: str) -> list[JobInfo]:
    """The answer to JOBS_ARGV."""
    return [_job(dict(zip(_FIELDS, row, strict=True))) for row in records("squeue", text, len(_FIELDS))]


def _job(facts: dict[str, str]) -> JobInfo:
    job_id = optional_integer(facts["JobID"])
    if job_id is None:
        raise malformed("squeue", facts["JobID"])
    tres = facts["tres-alloc"]
    code, signal = exit_status(facts["exit_code"])
    return JobInfo(
        id=job_id,
        name=facts["Name"],
        user=facts["UserName"],
        state=parse_job_state(facts["State"]),
        account=known(facts["Account"]),
        qos=known(facts["QOS"]),
        partition=facts["Partition"],
        reason=known(facts["Reason"]),
        nodes=node_names(facts["NodeList"]),
        node_count=integer(facts["NumNodes"]),
        cpus=integer(facts["NumCPUs"]),
        gpus=gpus_in_tres(tres),
        memory_mib=memory_mib(parse_tres(tres).get("mem", "")),
        priority=integer(facts["PriorityLong"]),
        **_family(facts),
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


def _family(facts: dict[str, str]) -> dict[str, object]:
    raise NotImplementedError
