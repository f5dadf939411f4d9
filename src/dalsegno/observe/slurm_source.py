"""The sources of Slurm metrics: one sinfo, one squeue and one sdiag per cycle; sshare and reservations less often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dalsegno.observe.collector import MetricSource, SourceGroup, StatusFamilies, status_families
from dalsegno.observe.exposition import Family
from dalsegno.observe.slurm_compat import SlurmDialect, fair_share_family, scheduler_families
from dalsegno.observe.slurm_jobs import IdleOwners, group_jobs, job_families, node_job_family
from dalsegno.observe.slurm_nodes import by_partition, node_families
from dalsegno.observe.slurm_sckyzo import (
    info_family,
    reservation_families,
    rpc_families,
    sckyzo_job_families,
    sckyzo_node_families,
    sckyzo_status_families,
)
from dalsegno.observe.slurm_usage import GpuSeconds, QueueWaits, has_started
from dalsegno.observe.slurm_vpenso import vpenso_job_families, vpenso_node_families
from dalsegno.slurm.client import SlurmClient

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
    """Metrics of the nodes. It also lists all partitions, so that the queue's metrics include empty ones."""

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
