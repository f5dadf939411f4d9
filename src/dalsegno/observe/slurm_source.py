"""The sources of Slurm metrics: one sinfo, one squeue and one sdiag per cycle; sshare and reservations less often."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from dalsegno.observe.collector import MetricSource, SourceGroup, StatusFamilies, status_families
from dalsegno.observe.exposition import Family, Histogram, HistogramFamily, MetricType, labelled
from dalsegno.observe.slurm_compat import SlurmDialect, fair_share_family, scheduler_families
from dalsegno.observe.slurm_jobs import ON_NODES, OTHER_ACCOUNTS, IdleOwners, group_jobs, job_families, node_job_family
from dalsegno.observe.slurm_nodes import by_partition, node_families
from dalsegno.observe.slurm_sckyzo import (
    info_family,
    reservation_families,
    rpc_families,
    sckyzo_job_families,
    sckyzo_node_families,
    sckyzo_status_families,
)
from dalsegno.observe.slurm_vpenso import vpenso_job_families, vpenso_node_families
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.load import QueuedJob

SELDOM = 10  # number of cycles between two queries for values that change slowly


def slurm_sources(client: SlurmClient, dialect: SlurmDialect) -> SourceGroup:
    """Return all sources of Slurm metrics. They share a thread, and query slurmctld one after the other."""
    nodes = SinfoSource(client, dialect)
    always: list[MetricSource] = [nodes, SqueueSource(client, dialect, nodes), SdiagSource(client, dialect)]
    seldom: list[MetricSource] = [SeldomSource("sshare", lambda: _fair_shares(client))]
    if dialect is SlurmDialect.SCKYZO:
        seldom.append(SeldomSource("reservations", lambda: reservation_families(client.reservations())))
        seldom.append(SeldomSource("version", lambda: [info_family(str(client.version()))]))
    return SourceGroup((*always, *seldom))


def slurm_status(dialect: SlurmDialect) -> StatusFamilies:
    """Return the collector's own metrics in a dialect."""
    return sckyzo_status_families if dialect is SlurmDialect.SCKYZO else status_families


class SinfoSource:
    """Metrics of the nodes. Each query also sets `partitions`, so that the queue's metrics include empty partitions."""

    name = "sinfo"

    def __init__(self, client: SlurmClient, dialect: SlurmDialect) -> None:
        self._client, self._dialect = client, dialect
        self.partitions: list[str] = []
        self.skipped_rows = 0

    def collect(self) -> Sequence[Family]:
        loads = self._client.node_loads()
        self.skipped_rows = loads.unreadable
        self.partitions = list(by_partition(loads.rows))
        compat = vpenso_node_families if self._dialect is SlurmDialect.VPENSO else sckyzo_node_families
        return [*node_families(loads.rows), *compat(loads.rows)]


class SqueueSource:
    """Metrics of the queue."""

    name = "squeue"

    def __init__(
        self,
        client: SlurmClient,
        dialect: SlurmDialect,
        nodes: SinfoSource,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._dialect, self._nodes, self._now = client, dialect, nodes, now
        self._waits, self._gpu_seconds, self._idle = QueueWaits(), GpuSeconds(), IdleOwners()
        self.skipped_rows = 0

    def collect(self) -> Sequence[Family]:
        now_s = self._now()  # read before the query: a job that starts during it counts from the next cycle on
        load = self._client.queue_load()
        self.skipped_rows = load.unreadable
        partitions = self._nodes.partitions
        started = [job for job in load.jobs if has_started(job)]
        self._waits.observe(started, partitions)
        self._gpu_seconds.observe(started, now_s)
        groups = self._idle.added_to(group_jobs(load.jobs))
        compat = vpenso_job_families if self._dialect is SlurmDialect.VPENSO else sckyzo_job_families
        return [
            *job_families(groups, partitions),
            node_job_family(load.jobs),
            self._waits.family(),
            self._gpu_seconds.family(),
            *compat(groups, partitions),
        ]


class SdiagSource:
    """Metrics of slurmctld and its schedulers."""

    name = "sdiag"

    def __init__(self, client: SlurmClient, dialect: SlurmDialect) -> None:
        self._client, self._dialect = client, dialect

    def collect(self) -> Sequence[Family]:
        diag = self._client.diag()
        return [*scheduler_families(diag), *(rpc_families(diag) if self._dialect is SlurmDialect.SCKYZO else ())]


class SeldomSource:
    """A source that is queried in every tenth cycle, and returns its last answer in between. After a failure, it is
    queried again in the next cycle."""

    def __init__(self, name: str, ask: Callable[[], Sequence[Family]], every: int = SELDOM) -> None:
        self.name, self._ask, self._every = name, ask, every
        self._last: Sequence[Family] = ()
        self._left, self.answered_at = 0, 0.0

    def collect(self) -> Sequence[Family]:
        if self._left <= 0:
            self._last = self._ask()
            self._left, self.answered_at = self._every, time.time()
        self._left -= 1
        return self._last


def _fair_shares(client: SlurmClient) -> list[Family]:
    """Return the fair shares; none on a cluster without accounting or with another priority plugin."""
    config = client.config()
    accounting = config.get("AccountingStorageType", "").endswith("/slurmdbd")
    multifactor = config.get("PriorityType", "").endswith("/multifactor")
    return [fair_share_family(client.fair_shares() if accounting and multifactor else {})]


# Metrics of the queue that need more than one cycle. They start at zero with the process, as Prometheus expects of
# counters.
WAIT_BOUNDS_S = (
    1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 86_400.0, 259_200.0, 604_800.0,
)  # fmt: skip
MAX_COUNTERS = 10_000  # maximum number of pairs of user and account


class QueueWaits:
    """The times that jobs waited in the queue, for all jobs that started since this process began."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] | None = None
        self._waits: dict[tuple[str, ...], Histogram] = {}

    def observe(self, started_jobs: Iterable[QueuedJob], partitions: Sequence[str]) -> None:
        """Add the jobs that started since the last cycle. If a job is requeued, its new wait is counted separately."""
        started = {(job.id, job.started_at): job for job in started_jobs}
        for name in partitions:
            self._waits.setdefault((name,), Histogram(WAIT_BOUNDS_S))
        if self._seen is not None:
            for key in started.keys() - self._seen:
                job = started[key]
                partition = job.partitions[:1]
                before = self._waits.get(partition, Histogram(WAIT_BOUNDS_S))
                self._waits[partition] = before.observe(float(max(0, job.started_at - job.submitted_at)))
        self._seen = set(started)

    def family(self) -> Family:
        """Return the histogram of each partition."""
        help = "Seconds between submission and start, of jobs that started while this process ran."
        return HistogramFamily("slurm_job_queue_wait_seconds", help, ("partition",), dict(self._waits))


def has_started(job: QueuedJob) -> bool:
    """Return whether a job has started. A job that was cancelled in the queue has a start time, but no nodes."""
    if job.state is JobState.PENDING or not job.partitions or not job.submitted_at:
        return False
    return bool(job.started_at and job.nodes and job.nodes != "(null)")


class GpuSeconds:
    """The GPU time of each user and account, integrated from the jobs of each cycle."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._seconds: dict[tuple[str, ...], float] = {}

    def observe(self, started_jobs: Iterable[QueuedJob], now_s: float) -> None:
        """Add the time since the last cycle. Jobs that ended meanwhile count until their end."""
        since_s, self._until_s = self._until_s, now_s
        for job in started_jobs:
            if job.gpus:
                self._add(job, _held_s(job, now_s if since_s is None else since_s, now_s) * job.gpus)

    def _add(self, job: QueuedJob, seconds: float) -> None:
        key: tuple[str, ...] = (job.user, job.account)
        if key not in self._seconds and len(self._seconds) >= MAX_COUNTERS:
            key = (job.user, OTHER_ACCOUNTS)
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def family(self) -> Family:
        """Return the counter of each user and account."""
        help = "GPU seconds of jobs, counted since this process began; it restarts at zero with the process."
        values = {key: round(seconds, 3) for key, seconds in self._seconds.items()}
        return labelled("dalsegno_gpu_seconds_total", help, ["user", "account"], values, MetricType.COUNTER)


def _held_s(job: QueuedJob, since_s: float, now_s: float) -> float:
    """Return how long a started job held its GPUs since the last cycle."""
    running = job.state in ON_NODES and job.state is not JobState.COMPLETING
    until_s = now_s if running or not job.ends_at else min(now_s, job.ends_at)
    return max(0.0, until_s - max(since_s, job.started_at))
