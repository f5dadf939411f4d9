"""Metrics of the queue that need more than one cycle: queue waits, and GPU time per user and account.

Both start at zero with the process, as Prometheus expects of counters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dalsegno.observe.exposition import Family, Histogram, HistogramFamily, MetricType, labelled
from dalsegno.observe.slurm_jobs import ON_NODES, OTHER_ACCOUNTS
from dalsegno.slurm.facts import JobState
from dalsegno.slurm.parse.load import QueuedJob

WAIT_BOUNDS_S = (
    1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 86_400.0, 259_200.0, 604_800.0,
)  # fmt: skip
MAX_COUNTERS = 10_000  # maximum number of pairs of user and account


class QueueWaits:
    """The queue waits (from submission to start) of all jobs that started since this process began."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] | None = None
        self._waits: dict[tuple[str, ...], Histogram] = {}

    def observe(self, started_jobs: Iterable[QueuedJob], partitions: Sequence[str]) -> None:
        """Add the jobs that started since the last cycle. A requeued job counts again, since its requeue."""
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
