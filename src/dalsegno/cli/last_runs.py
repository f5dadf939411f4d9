"""The runs that end with a cluster when it is taken down: find them, end them in order, and record how they ended."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli.watch import is_over
from dalsegno.errors import DalsegnoError
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.cluster import ClusterPlace
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.status import RunStatus

ORDERLY_S = 5.0
TAKEN_DOWN = "cancelled: its cluster was taken down"


@dataclass(frozen=True)
class RunOnCluster:
    """A run that has not ended, and its user. Nothing is written into another user's folder."""

    folder: RunFolder
    uid: int

    @property
    def run(self) -> str:
        return self.folder.run

    @property
    def ours(self) -> bool:
        return self.uid == os.geteuid()

    def is_under_way(self) -> bool:
        if self.ours:
            return is_under_way(self.folder)
        from dalsegno.recovery.run_hints import read_hint

        status = read_hint(self.folder.status, self.uid)
        return status is not None and not is_over(status)


def runs_on(place: ClusterPlace) -> list[RunOnCluster]:
    """Return the runs under way on the cluster: those that its controller keeps, of any user, and our own."""
    own = {run.root.resolve(): RunOnCluster(run, os.geteuid()) for run in _own(place)}
    kept = {run.folder.root.resolve() if run.ours else run.folder.root: run for run in _kept(place)}
    return sorted((run for run in {**kept, **own}.values() if run.is_under_way()), key=lambda each: each.run)


def _kept(place: ClusterPlace) -> Iterator[RunOnCluster]:
    from dalsegno.recovery.coordinators import Records
    from dalsegno.runs.folder import RunFolder
    from dalsegno.targets.folder import ClusterFolder

    records = Records(ClusterFolder(place.folder).runs)
    if records.folder.is_dir():
        for record in records.read()[0].values():
            yield RunOnCluster(RunFolder(Path(record.folder)), record.uid)


def _own(place: ClusterPlace) -> Iterator[RunFolder]:
    """Return our own runs, also those in a batch step, which no controller knows."""
    from dalsegno.cluster import runs_home
    from dalsegno.runs.submit.prepare import list_runs, read_plan
    from dalsegno.targets.folder import ClusterFolder, read_identity

    cluster = read_identity(ClusterFolder(place.folder).slurm_conf)
    for run in list_runs(runs_home()) if cluster else ():
        with contextlib.suppress(DalsegnoError, OSError):
            if is_under_way(run) and read_plan(run).cluster == cluster:
                yield run


def end_in_order(runs: Sequence[RunOnCluster]) -> None:
    """Make each coordinator end its workers, agents and jobs while it can. Runs of other users end with the cluster and
    show as lost: nothing is written into their folders."""
    ours = [run for run in runs if run.ours]
    for run in ours:
        with contextlib.suppress(OSError):
            os.close(os.open(run.folder.cancel, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644))
    until = time.monotonic() + ORDERLY_S
    while time.monotonic() < until and any(run.is_under_way() for run in ours):
        time.sleep(0.05)


def write_ends(runs: Sequence[RunOnCluster]) -> None:
    """Record how the runs ended, after all of the cluster is gone."""
    from dalsegno.runs.status import RunCause, write_status
    from dalsegno.runs.submit.prepare import given_up

    for run in runs:
        status = _status(run.folder) if run.ours else None
        if status is not None and not is_over(status):
            write_status(run.folder.status, given_up(status, time.time(), TERMINATED, TAKEN_DOWN, RunCause.TAKEN_DOWN))
        elif status is not None and status.cause is RunCause.CANCELLED:
            write_status(run.folder.status, replace(status, message=TAKEN_DOWN, cause=RunCause.TAKEN_DOWN))


def is_under_way(run: RunFolder) -> bool:
    status = _status(run)
    return status is not None and not is_over(status)


def _status(run: RunFolder) -> RunStatus | None:
    from dalsegno.runs.status import read_status

    with contextlib.suppress(DalsegnoError, OSError):
        return read_status(run.status)
    return None
