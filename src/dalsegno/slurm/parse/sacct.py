"""`sacct`: jobs that are over, from the accounting database."""

from __future__ import annotations

import re

from dalsegno.slurm.job_info import JobInfo
from dalsegno.slurm.parse.jobs import colon_status, node_names
from dalsegno.slurm.parse.text import FIELD_END, epoch, integer, known, malformed, optional_integer
from dalsegno.slurm.parse.tres import gpus_in_tres, memory_mib, parse_tres
from dalsegno.slurm.states import parse_job_state

_FIELDS = (
    "JobIDRaw",
    "JobID",
    "User",
    "Account",
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
    "JobName",
)

# --parsable ends each record with the delimiter too: with the line end it marks where a record stops.
HISTORY_ARGV = (
    "sacct",
    "--allusers",
    "--allocations",
    "--noheader",
    "--parsable",
    f"--delimiter={FIELD_END}",
    f"--format={','.join(_FIELDS)}",
)

_LABEL = re.compile(r"(\d+)(?:_(\d+|\[.*\])|\+(\d+))?$")


def parse_history(text: str) -> list[JobInfo]:
    """The answer to HISTORY_ARGV."""
    if not text.strip():
        return []
    *rows, rest = text.split(f"{FIELD_END}\n")
    if rest.strip() or not rows:
        raise malformed("sacct", rest)
    return [_job(row) for row in rows]


def _job(row: str) -> JobInfo:
    values = row.split(FIELD_END, len(_FIELDS) - 1)
    job_id = optional_integer(values[0])
    if len(values) != len(_FIELDS) or job_id is None:
        raise malformed("sacct", row)
    facts = dict(zip(_FIELDS, values, strict=True))
    tres = facts["AllocTRES"] or facts["ReqTRES"]
    code, signal = colon_status(facts["ExitCode"])
    array_id, task, het_id, offset = _family(facts["JobID"])
    limit_min = optional_integer(facts["TimelimitRaw"])
    return JobInfo(
        id=job_id,
        name=facts["JobName"],
        user=facts["User"],
        state=parse_job_state(facts["State"]),
        account=known(facts["Account"]),
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
    """Array id and task, heterogeneous id and offset, from `5`, `5_3`, `5_[4-9]`, `5+1`."""
    found = _LABEL.match(label)
    if found is None or len(label) > 400:
        return None, "", None, None
    whole, task, offset = found.groups()
    if task is not None:
        return int(whole), task.strip("[]"), None, None
    return None, "", optional_integer(whole) if offset else None, optional_integer(offset or "")
