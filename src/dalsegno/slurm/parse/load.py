"""Parse the queue and the nodes for metrics: few fields, once per cycle, up to 100,000 jobs.

`JobInfo` has three times as many fields. Reading all of them every few seconds would take most of a core on a large
cluster.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from dalsegno.slurm.facts import JobState, NodeFlag, NodeState, parse_job_state, parse_node_state
from dalsegno.slurm.parse.jobs import node_names
from dalsegno.slurm.parse.text import (
    PLAIN,
    Separators,
    epoch,
    gpus_in_gres,
    gpus_in_tres,
    integer,
    known,
    long_format,
    malformed,
    pairs,
    paragraphs,
)

_CACHED = 1 << 16  # values of a field that are parsed once: states, TRES, accounts

# squeue. Users choose their account where nothing enforces it, and a plugin may quote them in a reason. These come
# last: a field separator in them shifts no other field.
_JOB_FIELDS = (
    "JobID",
    "UserName",
    "Partition",
    "State",
    "NodeList",
    "NumCPUs",
    "tres-alloc",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "Reason",
    "Account",
)
# All tasks of an array, all states that slurmctld still holds, and no "1K" for 1024 CPUs.
QUEUE_LOAD_ARGV = ("squeue", "--all", "--noheader", "--array", "--states=all", "--noconvert")


class QueuedJob(NamedTuple):
    """A job, or one task of an array. Times are seconds since 1970; 0: not set."""

    id: int
    user: str
    partitions: tuple[str, ...]  # several while the job is pending, if the user names several
    state: JobState
    nodes: str  # as Slurm wrote it: `n[1-4]`
    cpus: int
    gpus: int
    submitted_at: int
    started_at: int  # an estimate while the job is pending
    ends_at: int  # an estimate until the job has ended
    reason: str
    account: str


class QueueLoad(NamedTuple):
    """The jobs in the output, and the number of records that could not be parsed."""

    jobs: list[QueuedJob]
    unreadable: int = 0


def queue_load_env(marks: Separators) -> dict[str, str]:
    """Return squeue's environment with the output format. As an argument, other users could read it."""
    return {"SQUEUE_FORMAT2": long_format(_JOB_FIELDS, marks)}


def parse_queue_load(text: str, marks: Separators) -> QueueLoad:
    """Parse the output of QUEUE_LOAD_ARGV under `queue_load_env` with the same marks."""
    found = _records("squeue", text, marks)
    width, field = len(_JOB_FIELDS), marks.field
    rows = [row.split(field, width - 1) for row in found]
    jobs = [_queued(row) for row in rows if len(row) == width and row[0].strip().isdecimal()]
    if found and not jobs:
        raise malformed("squeue", found[0])
    return QueueLoad(jobs, len(found) - len(jobs))


def _queued(row: list[str]) -> QueuedJob:
    job, user, partition, state, nodes, cpus, tres, submitted, started, ends, reason, account = row
    return QueuedJob(
        int(job[-18:]),
        user,
        _partitions(partition),
        _job_state(state),
        nodes,
        int(cpus) if cpus.isdecimal() and len(cpus) < 10 else integer(cpus),
        _gpus_in_tres(tres),
        _time(submitted),
        _time(started),
        _time(ends),
        _known(reason),
        _known(account),
    )


def _records(command: str, text: str, marks: Separators) -> list[str]:
    """Return the records. Truncated output is an error."""
    if not text.strip():
        return []
    *found, rest = text.split(f"{marks.record}\n")
    if rest.strip() or not found:
        raise malformed(command, rest)
    return found


def _time(text: str) -> int:
    return int(text) if len(text) == 10 and text.isdecimal() else 0


_job_state = lru_cache(_CACHED)(parse_job_state)
_gpus_in_tres = lru_cache(_CACHED)(gpus_in_tres)
_gpus_in_gres = lru_cache(_CACHED)(gpus_in_gres)
_known = lru_cache(_CACHED)(known)


@lru_cache(_CACHED)
def _partitions(text: str) -> tuple[str, ...]:
    return tuple(name for each in text.split(",") if (name := each.strip().rstrip("*")))


def nodes_of_job(text: str) -> tuple[str, ...]:
    """Return the names in a job's list of nodes."""
    return (text,) if text.replace("-", "").isalnum() else node_names("squeue", text)  # most jobs have one node


# sinfo
_NODE_FIELDS = (
    "NodeList",
    "Partition",
    "StateLong",
    "StateComplete",
    "CPUsState",
    "AllocMem",
    "Memory",
    "Gres",
    "GresUsed",
    "features_act",
)
NODE_LOAD_ARGV = ("sinfo", "--all", "--Node", "--noheader", "--Format", long_format(_NODE_FIELDS))


class NodeLoad(NamedTuple):
    """A node in one of its partitions: its state, and what is in use."""

    name: str
    partition: str
    state: NodeState
    flags: frozenset[NodeFlag]
    word: str  # sinfo's word for the state, without the signs after it: `drained`
    cpus_alloc: int
    cpus_idle: int
    cpus_other: int
    cpus: int
    memory_used_mib: int
    memory_mib: int
    gpus: int
    gpus_used: int
    features: str


class NodeLoads(NamedTuple):
    """The rows of sinfo, and the number of those that could not be parsed."""

    rows: list[NodeLoad]
    unreadable: int = 0


def parse_node_loads(text: str) -> NodeLoads:
    """Parse the output of NODE_LOAD_ARGV: one row for each partition of each node."""
    found = _records("sinfo", text, PLAIN)
    width = len(_NODE_FIELDS)
    split = [row.split(PLAIN.field, width - 1) for row in found]
    rows = [load for row in split if len(row) == width and (load := _node(row)) is not None]
    if found and not rows:
        raise malformed("sinfo", found[0])
    return NodeLoads(rows, len(found) - len(rows))


def _node(row: list[str]) -> NodeLoad | None:
    name, partition, word, complete, cpus, memory_used, memory, gres, gres_used, features = row
    aiot = [int(part) for part in cpus.split("/") if part.isdecimal() and len(part) < 10]
    if len(aiot) != 4 or not name:
        return None
    state, flags = _node_state(complete)
    return NodeLoad(
        name,
        partition.rstrip("*"),
        state,
        flags,
        _bare_word(word),
        *aiot,
        integer(memory_used),
        integer(memory),
        _gpus_in_gres(_known(gres)),
        _gpus_in_gres(_known(gres_used)),
        _known(features),
    )


_node_state = lru_cache(_CACHED)(parse_node_state)


@lru_cache(_CACHED)
def _bare_word(word: str) -> str:
    return word.strip().lower().rstrip("*~#!%$@^-+")


# sshare
FAIR_SHARE_ARGV = ("sshare", "--all", "--noheader", "--parsable2", "--format=Account,User,FairShare")


def parse_fair_shares(text: str) -> dict[str, float]:
    """Return the fair-share factor of each account: its own, or the mean of its users'.

    Under Slurm's default algorithm (Fair Tree), only users have a factor.
    """
    own: dict[str, float] = {}
    users: dict[str, list[float]] = {}
    for line in text.splitlines():
        account, _, rest = line.strip().partition("|")
        user, _, factor = rest.rpartition("|")
        number = _fraction(factor)
        if not account or number is None:
            users.setdefault(account, [])
        elif user:
            users.setdefault(account, []).append(number)
        else:
            own[account] = number
    means = {account: sum(factors) / len(factors) if factors else 0.0 for account, factors in users.items() if account}
    return {**means, **own}


def _fraction(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None


# Reservations
RESERVATIONS_ARGV = ("scontrol", "--all", "--oneliner", "show", "reservation")


class ReservationInfo(NamedTuple):
    """A reservation. Lists are as Slurm wrote them; times are seconds since 1970."""

    name: str
    active: bool
    users: str
    nodes: str
    partition: str
    flags: str
    starts_at: int
    ends_at: int
    node_count: int
    core_count: int


def parse_reservations(text: str) -> list[ReservationInfo]:
    """Parse the output of RESERVATIONS_ARGV."""
    if text.startswith("No reservations in the system") or not text.strip():
        return []
    return [_reservation(pairs(line)) for line in paragraphs("scontrol show reservation", text, "ReservationName")]


def _reservation(facts: dict[str, str]) -> ReservationInfo:
    return ReservationInfo(
        name=facts.get("ReservationName", ""),
        active=facts.get("State", "") == "ACTIVE",
        users=known(facts.get("Users", "")),
        nodes=known(facts.get("Nodes", "")),
        partition=known(facts.get("PartitionName", "")),
        flags=known(facts.get("Flags", "")),
        starts_at=epoch(facts.get("StartTime", "")) or 0,
        ends_at=epoch(facts.get("EndTime", "")) or 0,
        node_count=integer(facts.get("NodeCnt", "")),
        core_count=integer(facts.get("CoreCnt", "")),
    )
