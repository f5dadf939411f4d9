"""`sacct`: jobs that are over, from the accounting database.

Users' text is asked for apart, in columns of a fixed width: sacct takes its delimiter on the command line only, where
other users can read it while it runs.
"""

from __future__ import annotations

import re

from dalsegno.slurm.job_info import JobInfo
from dalsegno.slurm.parse.jobs import colon_status, node_names
from dalsegno.slurm.parse.text import PLAIN, ParseError, epoch, integer, known, malformed, optional_integer
from dalsegno.slurm.parse.tres import gpus_in_tres, memory_mib, parse_tres
from dalsegno.slurm.states import parse_job_state

_FIELDS = (
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
# Slurm refuses names of more than 1024 bytes.
_TEXTS = {"JobIDRaw": 24, "Account": 64, "JobName": 1024}

_ALL = ("sacct", "--allusers", "--allocations", "--noheader")

# --parsable ends each record with the delimiter too: with the line end it marks where a record stops.
HISTORY_ARGV = (*_ALL, "--parsable", f"--delimiter={PLAIN.field}", f"--format={','.join(_FIELDS)}")
TEXTS_ARGV = (*_ALL, "--format=" + ",".join(f"{name}%-{width}" for name, width in _TEXTS.items()))

_LABEL = re.compile(r"(\d+)(?:_(\d+|\[.*\])|\+(\d+))?$")


def parse_history(text: str, texts: bytes) -> list[JobInfo]:
    """Read the answers to HISTORY_ARGV and TEXTS_ARGV. A record that cannot be read is left out."""
    if not text.strip():
        return []
    *rows, rest = text.split(f"{PLAIN.field}\n")
    if rest.strip() or not rows:
        raise malformed("sacct", rest)
    written = _texts(texts)
    jobs = [job for row in rows if (job := _read(row, written)) is not None]
    if not jobs:
        raise malformed("sacct", rows[0])
    return jobs


def _texts(answer: bytes) -> dict[str, dict[str, str]]:
    """Return the texts of each job by its id. Every column has a blank after it, every record a line end."""
    length = sum(_TEXTS.values()) + len(_TEXTS) + 1
    found = {}
    for start in range(0, len(answer) - length + 1, length):
        row, at, texts = answer[start : start + length], 0, dict[str, str]()
        for name, width in _TEXTS.items():
            texts[name] = row[at : at + width].decode(errors="replace").strip()
            at += width + 1
        if not row.endswith(b" \n") or optional_integer(texts["JobIDRaw"]) is None:
            break  # not these columns: nothing after it can be trusted
        found[texts["JobIDRaw"]] = texts
    return found


def _read(row: str, written: dict[str, dict[str, str]]) -> JobInfo | None:
    try:
        return _job(row, written)
    except ParseError:
        return None


def _job(row: str, written: dict[str, dict[str, str]]) -> JobInfo:
    values = row.split(PLAIN.field)
    job_id = optional_integer(values[0])
    if len(values) != len(_FIELDS) or job_id is None:
        raise malformed("sacct", row)
    facts = dict(zip(_FIELDS, values, strict=True))
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
    """Array id and task, heterogeneous id and offset, from `5`, `5_3`, `5_[4-9]`, `5+1`."""
    found = _LABEL.match(label)
    if found is None or len(label) > 400:
        return None, "", None, None
    whole, task, offset = found.groups()
    if task is not None:
        return int(whole), task.strip("[]"), None, None
    return None, "", optional_integer(whole) if offset else None, optional_integer(offset or "")
