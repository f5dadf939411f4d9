"""`squeue`: the jobs Slurm has in hand.

Names, comments, accounts, paths and more in this answer are users' text, and may hold any byte but zero. So the marks
between fields are drawn anew for each question (`Marks.fresh`), and a record that cannot be read costs that record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dalsegno.slurm.job_info import JobInfo
from dalsegno.slurm.parse.jobs import array_task, node_names, unix_status
from dalsegno.slurm.parse.text import (
    Marks,
    ParseError,
    duration_s,
    epoch,
    integer,
    known,
    long_format,
    malformed,
    optional_integer,
    rows,
)
from dalsegno.slurm.parse.tres import gpus_in_tres, memory_mib, parse_tres
from dalsegno.slurm.states import parse_job_state

_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "HetJobOffset",
    "UserID",
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
    "PreemptTime",
    "TimeUsed",
    "TimeLimit",
    "exit_code",
    "RestartCnt",
    "BatchFlag",
    "Reservation",
    "BatchHost",
    "Name",
    "Comment",
)
# Asked for only where one job is looked at: the paths are long.
_PATHS = ("WorkDir", "Command", "StdOut", "StdErr")

JOBS_ARGV = ("squeue", "--all", "--noheader")


@dataclass(frozen=True)
class Queue:
    """The jobs of an answer, and how many of its records could not be read."""

    jobs: tuple[JobInfo, ...] = ()
    unreadable: int = 0


def jobs_env(marks: Marks, *, paths: bool = False) -> dict[str, str]:
    """Return what squeue must have in its environment: the format, where other users cannot read it."""
    return {"SQUEUE_FORMAT2": long_format(_names(paths), marks)}


def parse_jobs(text: str, marks: Marks, *, paths: bool = False) -> Queue:
    """Read the answer to JOBS_ARGV under `jobs_env` with the same marks."""
    fields = _names(paths)
    found = rows("squeue", text, marks)
    jobs = [job for row in found if (job := _read(fields, row)) is not None]
    if found and not jobs and len(found[0]) != len(fields):
        raise malformed("squeue", " ".join(found[0]))  # another format altogether, not a record that is odd
    return Queue(tuple(jobs), len(found) - len(jobs))


def excluded_env(marks: Marks) -> dict[str, str]:
    """Return the environment in which squeue tells the nodes that a job may not have. -O has no such field in 22.05."""
    return {"SQUEUE_FORMAT": f"%x{marks.record}"}


def parse_excluded(text: str, marks: Marks) -> tuple[str, ...]:
    """Read the answer to JOBS_ARGV with one job under `excluded_env`."""
    return next((node_names("squeue", row[0]) for row in rows("squeue", text, marks)), ())


def _names(paths: bool) -> tuple[str, ...]:
    return (*_FIELDS, *_PATHS) if paths else _FIELDS


def _read(fields: Sequence[str], row: Sequence[str]) -> JobInfo | None:
    try:
        return _job(dict(zip(fields, row, strict=True)))
    except (ParseError, ValueError):
        return None


def _job(facts: Mapping[str, str]) -> JobInfo:
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
        uid=optional_integer(facts["UserID"]),
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
        preempted_at=epoch(facts["PreemptTime"]),
        elapsed_s=duration_s(facts["TimeUsed"]) or 0,
        time_limit_s=duration_s(facts["TimeLimit"]),
        exit_code=code,
        exit_signal=signal,
        restarts=integer(facts["RestartCnt"]),
        batch=facts["BatchFlag"] not in ("", "0"),
        reservation=known(facts["Reservation"]),
        batch_host=known(facts["BatchHost"]),
        comment=known(facts["Comment"]),
        work_dir=known(facts.get("WorkDir", "")),
        command=known(facts.get("Command", "")),
        stdout=known(facts.get("StdOut", "")),
        stderr=known(facts.get("StdErr", "")),
    )
