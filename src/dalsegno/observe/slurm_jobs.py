"""Our own metrics of the queue, and the groups of jobs from which all metrics of the queue are computed.

A queue of 100,000 jobs is read once, into groups with the same user, account, partitions, state and reason. The metrics
are computed from these groups, of which there are a few thousand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from dalsegno.observe.exposition import Family, labelled
from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.load import QueuedJob, nodes_of_job
from dalsegno.slurm.parse.text import ParseError

MAX_ACCOUNTS = 1000  # accounts with a label of their own; users can invent accounts unless Slurm enforces them
OTHER_ACCOUNTS = "(other)"
MAX_IDLE, MAX_IDLE_PER_USER = 2000, 16  # maximum number of remembered owners without a job, in total and per user
ON_NODES = frozenset({JobState.RUNNING, JobState.COMPLETING, JobState.CONFIGURING, JobState.SUSPENDED})
USUAL_REASONS = ("BeginTime", "Dependency", "JobHeldAdmin", "JobHeldUser", "Priority", "Resources")
OTHER_REASON = "other"
_REASON = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}", re.ASCII)


class JobCategory(Enum):
    """The categories that our own metrics sort jobs into. OTHER stands for all other states, such as BOOT_FAIL."""

    PENDING = "pending"
    RUNNING = "running"
    SUSPENDED = "suspended"
    CONFIGURING = "configuring"
    COMPLETING = "completing"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMEOUT = "timeout"
    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    OUT_OF_MEMORY = "out_of_memory"
    OTHER = "other"


class JobKey(NamedTuple):
    """The properties that all jobs of a group share. Only pending jobs have a reason."""

    user: str
    account: str
    partitions: tuple[str, ...]
    state: JobState
    reason: str


class JobTally(NamedTuple):
    """The number of jobs in a group, and the resources that they use or request."""

    jobs: int
    cpus: int
    gpus: int


JobGroups = Mapping[JobKey, JobTally]


def group_jobs(jobs: Iterable[QueuedJob]) -> JobGroups:
    """Return the groups of the jobs. If there are more than MAX_ACCOUNTS accounts, those with the fewest jobs are
    counted together."""
    counts: dict[tuple[str, str, tuple[str, ...], JobState, str], list[int]] = {}
    pending = JobState.PENDING
    for job in jobs:
        state = job.state
        key = (job.user, job.account, job.partitions, state, short_reason(job.reason) if state is pending else "")
        found = counts.get(key)
        if found is None:
            counts[key] = [1, job.cpus, job.gpus]
        else:
            found[0] += 1
            found[1] += job.cpus
            found[2] += job.gpus
    return _with_few_accounts({JobKey(*key): JobTally(*tally) for key, tally in counts.items()})


def _with_few_accounts(groups: JobGroups) -> JobGroups:
    by_account: Counter[str] = Counter()
    for key, tally in groups.items():
        by_account[key.account] += tally.jobs
    if len(by_account) <= MAX_ACCOUNTS:
        return groups
    kept = {account for account, _ in by_account.most_common(MAX_ACCOUNTS - 1)}
    found: dict[JobKey, JobTally] = {}
    for key, tally in groups.items():
        known = key if key.account in kept else key._replace(account=OTHER_ACCOUNTS)
        before = found.get(known, JobTally(0, 0, 0))
        found[known] = JobTally(*(old + new for old, new in zip(before, tally, strict=True)))
    return found


class IdleOwners:
    """The owners of the jobs since this process started, at most MAX_IDLE. They are remembered, so that their series
    become 0 after their last job."""

    def __init__(self) -> None:
        self._known: dict[JobKey, None] = {}
        self._per_user: Counter[str] = Counter()

    def added_to(self, groups: JobGroups) -> JobGroups:
        """Return the groups, and an empty group for each remembered owner without a running job."""
        for key in groups:
            idle = key._replace(state=JobState.RUNNING, reason="")
            room = len(self._known) < MAX_IDLE and self._per_user[key.user] < MAX_IDLE_PER_USER
            if room and idle not in self._known:
                self._known[idle] = None
                self._per_user[key.user] += 1
        return {**dict.fromkeys(self._known, JobTally(0, 0, 0)), **groups}


@lru_cache(4096)
def short_reason(reason: str) -> str:
    """Return Slurm's word for a reason: `ReqNodeNotAvail` from `ReqNodeNotAvail, UnavailableNodes:n[1-3]`."""
    word = reason.partition(",")[0].strip("() ")
    return word if _REASON.fullmatch(word) else OTHER_REASON


@lru_cache(64)
def job_category(state: JobState) -> JobCategory:
    """Return the category of a state."""
    return JobCategory.__members__.get(state.name, JobCategory.OTHER)


def job_families(groups: JobGroups, partitions: Sequence[str]) -> list[Family]:
    """Return our own metrics of the queue, with zeros for all `partitions`."""
    jobs: dict[tuple[str, ...], float] = {
        (partition, category.value): 0 for partition in partitions for category in JobCategory
    }
    reasons: dict[tuple[str, ...], float] = {
        (partition, reason): 0 for partition in partitions for reason in USUAL_REASONS
    }
    users: dict[tuple[str, ...], float] = {}
    accounts: dict[tuple[str, ...], float] = {}
    for key, tally in groups.items():
        gpus = tally.gpus if key.state in ON_NODES else 0
        _add(users, (key.user,), gpus)
        _add(accounts, (key.account,), gpus)
        for partition in key.partitions:
            _add(jobs, (partition, job_category(key.state).value), tally.jobs)
            if key.state is JobState.PENDING:
                _add(reasons, (partition, key.reason), tally.jobs)
    in_each = "A job that waits for one of several partitions counts in each of them."
    return [
        labelled("dalsegno_jobs", f"Jobs by state. {in_each}", ["partition", "state"], jobs),
        labelled(
            "dalsegno_jobs_pending_reason", f"Pending jobs by reason. {in_each}", ["partition", "reason"], reasons
        ),
        labelled("dalsegno_user_gpus", "GPUs that a user's jobs hold now.", ["user"], users),
        labelled("dalsegno_account_gpus", "GPUs that an account's jobs hold now.", ["account"], accounts),
    ]


def _add(values: dict[tuple[str, ...], float], key: tuple[str, ...], value: float) -> None:
    values[key] = values.get(key, 0) + value


def node_job_family(jobs: Iterable[QueuedJob]) -> Family:
    """Return which job is on which node, for joins: `… * on(node) group_left(job_id, user) dalsegno_node_job`."""
    values: dict[tuple[str, ...], float] = {}
    for job in jobs:
        if job.nodes and job.state in ON_NODES:
            label = str(job.id)
            values.update({(node, label, job.user): 1 for node in _nodes(job.nodes)})
    help = "1 for each job on each node; join with it on the label node."
    return labelled("dalsegno_node_job", help, ["node", "job_id", "user"], values)


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return nodes_of_job(text)
    except ParseError:
        return ()
