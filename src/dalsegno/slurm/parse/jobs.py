"""Parse the output of squeue, sbatch and sacct."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dalsegno.hostlist import HostlistError, expand
from dalsegno.slurm.facts import JobInfo, parse_job_state
from dalsegno.slurm.parse.outputs import with_output_files
from dalsegno.slurm.parse.text import (
    PLAIN,
    ParseError,
    Separators,
    duration_s,
    epoch,
    gpus_in_tres,
    integer,
    known,
    long_format,
    malformed,
    memory_mib,
    optional_integer,
    parse_tres,
    rows,
)


def node_names(command: str, text: str) -> tuple[str, ...]:
    """Return the nodes of a job; empty for a pending job, for which sacct prints `None assigned`."""
    if not known(text) or text.strip() == "None assigned":
        return ()
    try:
        return tuple(expand(text))
    except HostlistError as error:
        raise malformed(command, text) from error


def array_task(text: str) -> str:
    """Return `3` or `4-9%2`; "" for a job that is not part of an array."""
    return known(text)


def unix_status(text: str) -> tuple[int, int]:
    """Return the exit code and signal.

    squeue 22.05 prints a wait(2) status, where 768 is code 3. Newer releases print `3:0`.
    """
    if ":" in text:
        return colon_status(text)
    status = optional_integer(text) or 0
    signal = status & 0x7F
    return 0 if signal else (status >> 8) & 0xFF, signal  # after a signal, the upper byte is not an exit code


def colon_status(text: str) -> tuple[int, int]:
    """Return the exit code and signal from `code:signal`."""
    code, _, signal = text.partition(":")
    return optional_integer(code) or 0, optional_integer(signal) or 0


# Output of squeue
_SQUEUE_FIELDS = (
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
# Long fields, which are requested only for a single job
_PATHS = ("WorkDir", "Command", "StdOut", "StdErr")

JOBS_ARGV = ("squeue", "--all", "--noheader", "--noconvert")  # without --noconvert, 1024 CPUs are printed as `1K`


@dataclass(frozen=True)
class JobList:
    """The jobs in the output, and the number of records that could not be parsed."""

    jobs: tuple[JobInfo, ...] = ()
    unreadable: int = 0


def jobs_env(marks: Separators, *, paths: bool = False) -> dict[str, str]:
    """Return squeue's environment with the output format. Other users could read the format if it were an argument."""
    return {"SQUEUE_FORMAT2": long_format(_names(paths), marks)}


def parse_jobs(text: str, marks: Separators, *, paths: bool = False) -> JobList:
    """Parse the output of JOBS_ARGV. The command must have run with `jobs_env` and the same separators (`marks`)."""
    fields = _names(paths)
    found = rows("squeue", text, marks)
    jobs = [job for row in found if (job := _read_queued(fields, row)) is not None]
    jobs = [with_output_files(job) for job in jobs] if paths else jobs
    if found and not jobs and len(found[0]) != len(fields):
        raise malformed("squeue", " ".join(found[0]))  # the output has another format, so no record could be parsed
    return JobList(tuple(jobs), len(found) - len(jobs))


def excluded_env(marks: Separators) -> dict[str, str]:
    """Return the environment that makes squeue print a job's excluded nodes. In 22.05, -O has no such field."""
    return {"SQUEUE_FORMAT": f"%x{marks.record}"}


def parse_excluded(text: str, marks: Separators) -> tuple[str, ...]:
    """Parse the output of JOBS_ARGV for one job. The command must have run with `excluded_env` and the same separators
    (`marks`)."""
    return next((node_names("squeue", row[0]) for row in rows("squeue", text, marks)), ())


def _names(paths: bool) -> tuple[str, ...]:
    return (*_SQUEUE_FIELDS, *_PATHS) if paths else _SQUEUE_FIELDS


def _read_queued(fields: Sequence[str], row: Sequence[str]) -> JobInfo | None:
    try:
        return _queued_job(dict(zip(fields, row, strict=True)))
    except (ParseError, ValueError):
        return None


def _queued_job(facts: Mapping[str, str]) -> JobInfo:
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


def parse_submitted(text: str) -> int:
    """Return the job id from `sbatch --parsable`: `12` or `12;cluster` on the last line, after plugin messages."""
    last = text.strip().splitlines()[-1] if text.strip() else ""
    job_id = optional_integer(last.partition(";")[0])
    if job_id is None:
        raise malformed("sbatch --parsable", text)
    return job_id


# Output of sacct
_SACCT_FIELDS = (
    "JobIDRaw",
    "JobID",
    "User",
    "QOS",
    "Partition",
    "State",
    "Reason",
    "NodeList",
    "NNodes",
    "AllocCPUS",
    "ReqCPUS",
    "AllocTRES",
    "ReqTRES",
    "Priority",
    "Submit",
    "Start",
    "End",
    "ElapsedRaw",
    "TimelimitRaw",
    "ExitCode",
    "Reservation",
)
# field -> column width in bytes. Slurm refuses job names of more than 1024 bytes.
_TEXTS = {"JobIDRaw": 24, "Account": 64, "JobName": 1024}

_ALL = ("sacct", "--allusers", "--allocations", "--noheader")

# --parsable also adds the delimiter after the last field, so a record ends with the delimiter and a line break.
HISTORY_ARGV = (*_ALL, "--parsable", f"--delimiter={PLAIN.field}", f"--format={','.join(_SACCT_FIELDS)}")
TEXTS_ARGV = (*_ALL, "--format=" + ",".join(f"{name}%-{width}" for name, width in _TEXTS.items()))

_LABEL = re.compile(r"(\d+)(?:_(\d+|\[.*\])|\+(\d+))?$")


def parse_history(text: str, texts: bytes) -> list[JobInfo]:
    """Parse the output of HISTORY_ARGV and TEXTS_ARGV. Records that cannot be parsed are omitted."""
    if not text.strip():
        return []
    *rows, rest = text.split(f"{PLAIN.field}\n")
    if rest.strip() or not rows:
        raise malformed("sacct", rest)
    written = _texts(texts)
    jobs = [job for row in rows if (job := _read_ended(row, written)) is not None]
    if not jobs:
        raise malformed("sacct", rows[0])
    return jobs


def _texts(answer: bytes) -> dict[str, dict[str, str]]:
    """Return the fields in _TEXTS of each job, by job id.

    Every column ends with a blank, and every record with a line break.
    """
    length = sum(_TEXTS.values()) + len(_TEXTS) + 1
    found = {}
    for start in range(0, len(answer) - length + 1, length):
        row, at, texts = answer[start : start + length], 0, dict[str, str]()
        for name, width in _TEXTS.items():
            texts[name] = row[at : at + width].decode(errors="replace").strip()
            at += width + 1
        if not row.endswith(b" \n") or optional_integer(texts["JobIDRaw"]) is None:
            break  # the columns do not match, so the rest of the output cannot be trusted
        found[texts["JobIDRaw"]] = texts
    return found


def _read_ended(row: str, written: dict[str, dict[str, str]]) -> JobInfo | None:
    try:
        return _ended_job(row, written)
    except ParseError:
        return None


def _ended_job(row: str, written: dict[str, dict[str, str]]) -> JobInfo:
    values = row.split(PLAIN.field)
    job_id = optional_integer(values[0])
    if len(values) != len(_SACCT_FIELDS) or job_id is None:
        raise malformed("sacct", row)
    facts = dict(zip(_SACCT_FIELDS, values, strict=True))
    texts = written.get(facts["JobIDRaw"], {})
    tres = facts["AllocTRES"] or facts["ReqTRES"]
    code, signal = colon_status(facts["ExitCode"])
    array_id, task, het_id, offset = _family(facts["JobID"])
    limit_min = optional_integer(facts["TimelimitRaw"])
    return JobInfo(
        id=job_id,
        name=texts.get("JobName", ""),
        user=facts["User"],
        state=parse_job_state(facts["State"]),
        account=known(texts.get("Account", "")),
        qos=known(facts["QOS"]),
        partition=facts["Partition"],
        reason=known(facts["Reason"]),
        nodes=node_names("sacct", facts["NodeList"]),
        node_count=integer(facts["NNodes"]),
        cpus=integer(facts["AllocCPUS"]) or integer(facts["ReqCPUS"]),
        gpus=gpus_in_tres(tres),
        memory_mib=memory_mib(parse_tres(tres).get("mem", "")),
        priority=integer(facts["Priority"]),
        array_id=array_id,
        array_task=task,
        het_id=het_id,
        het_offset=offset,
        submitted_at=epoch(facts["Submit"]),
        started_at=epoch(facts["Start"]),
        ends_at=epoch(facts["End"]),
        elapsed_s=integer(facts["ElapsedRaw"]),
        time_limit_s=None if limit_min is None else limit_min * 60,
        exit_code=code,
        exit_signal=signal,
        reservation=known(facts["Reservation"]),
    )


def _family(label: str) -> tuple[int | None, str, int | None, int | None]:
    """Return the array id and task, and the heterogeneous id and offset, from `5`, `5_3`, `5_[4-9]` or `5+1`."""
    found = _LABEL.match(label)
    if found is None or len(label) > 400:
        return None, "", None, None
    whole, task, offset = found.groups()
    if task is not None:
        return int(whole), task.strip("[]"), None, None
    return None, "", optional_integer(whole) if offset else None, optional_integer(offset or "")
