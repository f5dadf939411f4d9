"""Parse the queue and the nodes for metrics.

Only a few fields are read, once per cycle, for up to 100,000 jobs. `JobInfo` has three times as many fields; reading
all of them every few seconds would take most of a core on a large cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from dalsegno.slurm.facts import JobState, NodeInfo, parse_job_state, parse_node_state
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

MAX_NAME = 100  # maximum length of the names of users and accounts
_CHUNK = 1 << 13  # number of rows whose fields are in memory at a time
_CACHED = 1 << 16  # maximum number of parsed values that are cached per field, such as states, TRES and accounts

# Fields of squeue. The account and the reason come last, so that a field separator in them cannot shift other fields.
# If nothing enforces accounts, users choose them freely, and a plugin may quote users in a reason.
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
# Print one line per array task, include ended jobs that are not purged yet, and print 1024 CPUs as "1024", not "1K".
QUEUE_LOAD_ARGV = ("squeue", "--all", "--noheader", "--array", "--states=all", "--noconvert")


class QueuedJob(NamedTuple):
    """A job, or one task of an array. Times are Unix times; 0 means not set."""

    id: int
    user: str
    partitions: tuple[str, ...]  # several for a pending job, if the user named several
    state: JobState
    nodes: str  # node list as Slurm prints it, such as `n[1-4]`
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
    """Return squeue's environment with the output format.

    The format is not an argument, because other users could read arguments.
    """
    return {"SQUEUE_FORMAT2": long_format(_JOB_FIELDS, marks)}


def parse_queue_load(text: str, marks: Separators) -> QueueLoad:
    """Parse the output of QUEUE_LOAD_ARGV, which was run with `queue_load_env` and the same separators (`marks`)."""
    found = _records("squeue", text, marks)
    width, field = len(_JOB_FIELDS), marks.field
    jobs: list[QueuedJob] = []
    for start in range(0, len(found), _CHUNK):
        split = [row.split(field, width - 1) for row in found[start : start + _CHUNK]]
        jobs += _queued_jobs([row for row in split if len(row) == width and row[0].isdecimal() and len(row[0]) < 19])
    if found and not jobs:
        raise malformed("squeue", found[0])
    return QueueLoad(jobs, len(found) - len(jobs))


def _queued_jobs(rows: list[list[str]]) -> list[QueuedJob]:
    """Return the jobs of all rows. Processing by column takes half the time of processing by row."""
    if not rows:
        return []
    ids, users, partitions, states, nodes, cpus, tres, submitted, started, ends, reasons, accounts = zip(
        *rows, strict=True
    )
    return list(
        map(
            QueuedJob,
            map(int, ids),
            map(_name, users),
            map(_partitions, partitions),
            map(_job_state, states),
            nodes,
            map(_integer, cpus),
            map(_gpus_in_tres, tres),
            _times(submitted),
            _times(started),
            _times(ends),
            map(_known, reasons),
            map(_name, accounts),
        )
    )


def _times(column: Iterable[str]) -> list[int]:
    return [int(text) if len(text) == 10 and text.isdecimal() else 0 for text in column]


def _records(command: str, text: str, marks: Separators) -> list[str]:
    """Return the records. Truncated output is an error."""
    if not text.strip():
        return []
    *found, rest = text.split(f"{marks.record}\n")
    if rest.strip() or not found:
        raise malformed(command, rest)
    return found


_job_state = lru_cache(_CACHED)(parse_job_state)
_gpus_in_tres = lru_cache(_CACHED)(gpus_in_tres)
_gpus_in_gres = lru_cache(_CACHED)(gpus_in_gres)
_known = lru_cache(_CACHED)(known)


@lru_cache(_CACHED)
def _name(text: str) -> str:
    """Return a name as it appears in labels, so that names that look the same are counted together."""
    shown = text if text.isprintable() else "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
    return known(shown[:MAX_NAME])


_integer = lru_cache(_CACHED)(integer)


@lru_cache(_CACHED)
def _partitions(text: str) -> tuple[str, ...]:
    return tuple(name for each in text.split(",") if (name := each.strip().rstrip("*")))


def nodes_of_job(text: str) -> tuple[str, ...]:
    """Return the names in a job's list of nodes."""
    # A short cut, because most jobs have one node.
    return (text,) if text.replace("-", "").isalnum() else node_names("squeue", text)


# Output of sinfo
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
    """A node in one of its partitions, with its state and the resources in use."""

    name: str
    partition: str
    word: str  # sinfo's word for the state without its suffix, such as `drained`
    in_service: bool  # the same as `NodeInfo.in_service`
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
    """The rows of sinfo, and the number of rows that could not be parsed."""

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
    counts = _cpu_counts(cpus)
    if counts is None or not name:
        return None
    return NodeLoad(
        name,
        partition.rstrip("*"),
        _bare_word(word),
        _in_service(complete),
        *counts,
        _integer(memory_used),
        _integer(memory),
        _gpus_in_gres(_known(gres)),
        _gpus_in_gres(_known(gres_used)),
        _known(features),
    )


@lru_cache(_CACHED)
def _cpu_counts(text: str) -> tuple[int, int, int, int] | None:
    """Return the allocated, idle, other and total CPUs in `8/24/0/32`."""
    parts = text.split("/")
    if len(parts) != 4 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2]), int(parts[3])


@lru_cache(_CACHED)
def _in_service(complete: str) -> bool:
    state, flags = parse_node_state(complete)
    return NodeInfo("", state, flags).in_service


@lru_cache(_CACHED)
def _bare_word(word: str) -> str:
    return word.strip().lower().rstrip("*~#!%$@^-+")


# Output of sshare
FAIR_SHARE_ARGV = ("sshare", "--all", "--noheader", "--parsable2", "--format=Account,User,FairShare")


def parse_fair_shares(text: str) -> dict[str, float]:
    """Return the fair-share factor of each account: its own factor, or the mean of its users' factors.

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


# Output of `scontrol show reservation`
RESERVATIONS_ARGV = ("scontrol", "--all", "--oneliner", "show", "reservation")


class ReservationInfo(NamedTuple):
    """A reservation. Lists have Slurm's notation; times are Unix times."""

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
    accounts: str = ""


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
        accounts=known(facts.get("Accounts", "")),
    )
