"""`scontrol show job`: everything about one job, also for some minutes after its end."""

from __future__ import annotations

import re
from collections import defaultdict

from dalsegno.slurm.job_info import JobInfo
from dalsegno.slurm.parse.jobs import array_task, colon_status, node_names
from dalsegno.slurm.parse.text import duration_s, epoch, integer, known, malformed, optional_integer, pairs, paragraphs
from dalsegno.slurm.parse.tres import gpus_in_tres, memory_mib, parse_tres
from dalsegno.slurm.states import parse_job_state

JOB_ARGV = ("scontrol", "--all", "--oneliner", "show", "job")

_COMMAND = "scontrol show job"
_OWNER = re.compile(r"\s+(?:HetJobIdSet=\S+\s+)?UserId=\S+\(\d+\) GroupId=")


def parse_job(text: str) -> list[JobInfo]:
    """The answer to JOB_ARGV and an id: one job, or all tasks of an array, or all parts of a heterogeneous job."""
    if not text.strip() or text.startswith("No jobs in the system"):
        return []
    return [_job(_facts(one)) for one in paragraphs(_COMMAND, text, "JobId")]


def _facts(text: str) -> dict[str, str]:
    """The name comes early and may hold anything, `JobState=RUNNING` too: it ends where the owner is told."""
    owner = _OWNER.search(text)
    if owner is None:
        raise malformed(_COMMAND, text)
    ids, _, name = text[: owner.start()].partition(" JobName=")
    told = {**pairs(text[owner.start() :]), **pairs(ids)}
    if optional_integer(told.get("JobId", "")) is None or "JobState" not in told:
        raise malformed(_COMMAND, text)
    return defaultdict(str, {key: known(value) for key, value in told.items()} | {"JobName": name})


def _job(fact: dict[str, str]) -> JobInfo:
    code, signal = colon_status(fact["ExitCode"])
    # 24.05 renamed TRES and told asked from given.
    tres = fact["TRES"] or fact["AllocTRES"] or fact["ReqTRES"]
    return JobInfo(
        id=int(fact["JobId"]),
        name=fact["JobName"],
        user=re.sub(r"\(\d+\)$", "", fact["UserId"]),
        state=parse_job_state(fact["JobState"]),
        account=fact["Account"],
        qos=fact["QOS"],
        partition=fact["Partition"],
        reason=fact["Reason"],
        nodes=node_names(_COMMAND, fact["NodeList"]),
        node_count=integer(fact["NumNodes"]),
        cpus=integer(fact["NumCPUs"]),
        gpus=gpus_in_tres(tres),
        memory_mib=memory_mib(parse_tres(tres).get("mem", "")),
        priority=integer(fact["Priority"]),
        array_id=optional_integer(fact["ArrayJobId"]),
        array_task=array_task(fact["ArrayTaskId"]),
        het_id=optional_integer(fact["HetJobId"]),
        het_offset=optional_integer(fact["HetJobOffset"]),
        submitted_at=epoch(fact["SubmitTime"]),
        started_at=epoch(fact["StartTime"]),
        ends_at=epoch(fact["EndTime"]),
        preempted_at=epoch(fact["PreemptTime"]),
        elapsed_s=duration_s(fact["RunTime"]) or 0,
        time_limit_s=duration_s(fact["TimeLimit"]),
        exit_code=code,
        exit_signal=signal,
        restarts=integer(fact["Restarts"]),
        reservation=fact["Reservation"],
        batch_host=fact["BatchHost"],
        batch=fact["BatchFlag"] not in ("", "0"),
        comment=fact["Comment"],
        excluded=node_names(_COMMAND, fact["ExcNodeList"]),
        work_dir=fact["WorkDir"],
        command=fact["Command"],
        stdout=fact["StdOut"],
        stderr=fact["StdErr"],
    )
