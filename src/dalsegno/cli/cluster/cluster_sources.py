"""The sources of facts for `status` and `top`: the target, Slurm, the controller's socket, and run folders."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.errors import CommandFailed, DalsegnoError

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.health.messages import GpuReading
    from dalsegno.overview.facts import FailingScrape, ObservedRun, RecoveryView
    from dalsegno.recovery.journal.event import Event
    from dalsegno.runs.folder import RunFolder
    from dalsegno.runs.slow_ranks import NodeReading
    from dalsegno.targets.base import ClusterStatus, Target

SLURM_S = 5.0
OLD_RUNS = 8  # maximum number of this user's runs that are read from their own folders


@dataclass(frozen=True)
class ClusterSources:
    """The sources of one cluster. `recovery_view`, `events` and `gpus` raise DalsegnoError if the controller does not
    answer."""

    name: str
    target: Target | None  # None inside a host of the cluster, and for a cluster that Dal Segno did not create
    slurm: SlurmHere | None  # used if there is no target
    controller: Path | None

    def status(self) -> ClusterStatus:
        """Return the status of the cluster. If slurmctld does not answer, the status says so; that is not an error."""
        from dalsegno.cli.controller_requests import meaning_of
        from dalsegno.overview.gather import status_from_slurm

        if self.target is not None:
            return self.target.status()
        if self.slurm is None:
            raise DalsegnoError("there is no Slurm here", hint="name a cluster with `--cluster`")
        try:
            return status_from_slurm(self.name, self.slurm.client_within(SLURM_S))
        except CommandFailed as fault:  # no slurm.conf: this host belongs to no cluster
            raise meaning_of(fault) from None

    def recovery_view(self) -> RecoveryView | None:
        """Return the controller's view; None if the cluster has no controller."""
        from dalsegno.overview.gather import ask_recovery_view

        return ask_recovery_view(self.controller) if self.controller else None

    def events(self, since: int) -> list[Event]:
        from dalsegno.overview.gather import ask_events

        return ask_events(self.controller, since) if self.controller else []

    def runs(self, *, progress: bool = False, ended: bool = False) -> Sequence[ObservedRun]:
        """Return the controller's runs that this user may see. With `ended`, or if the controller does not answer, add
        the user's last runs from their folders."""
        from dalsegno.overview.gather import ask_run_folders, merge_runs, read_runs
        from dalsegno.targets.base import name_user

        kept: list[RunFolder] | None = None
        with contextlib.suppress(DalsegnoError):
            kept = ask_run_folders(self.controller) if self.controller else None
        own = [] if kept is not None and not ended else self._own_runs()
        return read_runs(merge_runs(kept or [], own), progress=progress, name_of=partial(name_user, self.target))

    def gpus(self) -> dict[str, tuple[GpuReading, ...]]:
        """Return the last readings of GPUs by node; empty if the cluster has no controller."""
        from dalsegno.overview.gather import ask_gpus

        return ask_gpus(self.controller) if self.controller else {}

    def readings(self) -> dict[str, NodeReading]:
        """Return what the nodes' agents report, by node; empty if the controller does not answer."""
        from dalsegno.overview.gather import ask_readings

        with contextlib.suppress(DalsegnoError):
            return ask_readings(self.controller) if self.controller else {}
        return {}

    def failing_scrapes(self) -> tuple[FailingScrape, ...]:
        """Return the exporters that the cluster's Prometheus cannot read; empty if no Prometheus answers."""
        from dalsegno.overview.gather import ask_failing_scrapes

        return ask_failing_scrapes(self.target) if self.target is not None else ()

    @property
    def sees_all_runs(self) -> bool:
        """Return whether this user may see the runs of all users in the controller's list."""
        try:
            return self.controller is not None and os.geteuid() in (0, self.controller.stat().st_uid)
        except OSError:
            return False

    def _own_runs(self) -> list[RunFolder]:
        """Return this user's last runs on this cluster, from their folders."""
        from dalsegno.cluster import cluster_id, runs_home
        from dalsegno.runs.submit.prepare import list_runs, read_plan
        from dalsegno.targets.base import CanForward

        target = self.target
        if target is not None and isinstance(target, CanForward):
            return []  # unknown here, because the folders of runs are on the cluster's head node
        here = cluster_id(self.slurm.env if self.slurm else target.user_env(os.environ) if target else {})
        found = []
        for run in list_runs(runs_home())[: 4 * OLD_RUNS]:
            with contextlib.suppress(DalsegnoError, OSError):
                if read_plan(run).cluster == here:
                    found.append(run)
        return found[:OLD_RUNS]


def open_sources(name: str | None) -> ClusterSources:
    """Open the named cluster, else the one that this shell uses, else Dal Segno's only cluster, else this machine's
    Slurm."""
    from dalsegno.cli.controller_requests import no_cluster
    from dalsegno.cluster import find_slurm, folder_of, target_of

    slurm = find_slurm(name)
    if slurm.controller is None and not slurm.env.get("SLURM_CONF") and not name:
        from shutil import which

        if which("sinfo", path=slurm.env.get("PATH")) is None:
            raise no_cluster()
    folder = folder_of(slurm.env)
    return ClusterSources(folder.name if folder else "Slurm", target_of(slurm), slurm, slurm.controller)
