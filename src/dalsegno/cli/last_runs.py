"""The runs that a cluster takes with it when it is taken down: found, ended in order, and told of."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.cli.watch import CANCELLED, is_over
from dalsegno.errors import DalsegnoError
from dalsegno.train.contract import TERMINATED

if TYPE_CHECKING:
    from dalsegno.cluster import Place
    from dalsegno.launch.folder import RunFolder
    from dalsegno.launch.status import Status

ORDERLY_S = 5.0
TAKEN_DOWN = f"{CANCELLED}: its cluster was taken down"


def runs_on(place: Place) -> list[RunFolder]:
    """Runs under way on the cluster: those that its controller keeps, whose ever they are, and our own."""
    found = {run.root.resolve(): run for run in (*_kept(place), *_own(place)) if is_under_way(run)}
    return sorted(found.values(), key=lambda run: run.run)


def _kept(place: Place) -> Iterator[RunFolder]:
    from dalsegno.launch.folder import RunFolder
    from dalsegno.recovery.records import Records
    from dalsegno.targets.local.folder import Folder

    records = Records(Folder(place.folder).runs)
    if records.folder.is_dir():
        yield from (RunFolder(Path(record.folder)) for record in records.read()[0].values())


def _own(place: Place) -> Iterator[RunFolder]:
    """Also those in a batch step, which no controller knows."""
    from dalsegno.cluster import cluster_id, runs_home
    from dalsegno.jobs import list_runs, read_plan
    from dalsegno.targets.local.folder import Folder

    cluster = cluster_id({"SLURM_CONF": str(Folder(place.folder).slurm_conf)})
    for run in list_runs(runs_home()) if cluster else ():
        with contextlib.suppress(DalsegnoError, OSError):
            if is_under_way(run) and read_plan(run).cluster == cluster:
                yield run


def end_in_order(runs: Sequence[RunFolder]) -> None:
    """Have each coordinator end workers, agents and jobs, while it can. Nothing is written among another's files:
    those runs end with the cluster, and read as lost."""
    for run in runs:
        if _is_ours(run):
            with contextlib.suppress(OSError):
                os.close(os.open(run.cancel, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644))
    until = time.monotonic() + ORDERLY_S
    while time.monotonic() < until and any(is_under_way(run) for run in runs if _is_ours(run)):
        time.sleep(0.05)


def write_ends(runs: Sequence[RunFolder]) -> None:
    """When all of the cluster is gone: nobody else can tell any more how these ended."""
    from dalsegno.jobs import given_up
    from dalsegno.launch.status import write_status

    for run in runs:
        status = _status(run) if _is_ours(run) else None
        if status is not None and not is_over(status):
            write_status(run.status, given_up(status, time.time(), TERMINATED, TAKEN_DOWN))
        elif status is not None and status.message == CANCELLED:
            write_status(run.status, replace(status, message=TAKEN_DOWN))


def _is_ours(run: RunFolder) -> bool:
    with contextlib.suppress(OSError):
        return run.root.stat().st_uid == os.geteuid()
    return False


def is_under_way(run: RunFolder) -> bool:
    status = _status(run)
    return status is not None and not is_over(status)


def _status(run: RunFolder) -> Status | None:
    from dalsegno.launch.status import read_status

    with contextlib.suppress(DalsegnoError, OSError):
        return read_status(run.status)
    return None
