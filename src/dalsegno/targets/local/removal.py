"""What goes with a cluster that is taken down, in consequences. Pure, but for the looking."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dalsegno.errors import DalsegnoError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.observe import controller_runs
from dalsegno.targets.local.plan import named


@dataclass(frozen=True)
class Removal:
    """`jobs` are those that are not over; `homes` the users' folders that hold something."""

    jobs: tuple[JobInfo, ...] = ()
    homes: tuple[str, ...] = ()

    def sentences(self, runs: Collection[str]) -> list[str]:
        """`runs` are those known to be under way: their jobs are not told of again."""
        return list(self._sentences(runs))

    def _sentences(self, runs: Collection[str]) -> Iterator[str]:
        others = [f"{job.label} of {job.user}" for job in self.jobs if job.name not in runs]
        if runs:
            yield f"ends {named('run', runs)}"
        if others:
            yield f"ends {named('job', others)}"
        if self.homes:
            yield f"deletes {named('home folder', self.homes)}, with all runs and checkpoints in them"


def look_at(folder: Folder, slurm: SlurmClient) -> Removal:
    """Of a cluster that is damaged, what can be seen."""
    return Removal(_jobs(folder, slurm), _homes(folder))


def _jobs(folder: Folder, slurm: SlurmClient) -> tuple[JobInfo, ...]:
    with contextlib.suppress(DalsegnoError):
        if controller_runs(folder):
            return tuple(job for job in slurm.jobs() if not job.state.ended)
    return ()


def _homes(folder: Folder) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(sorted(home.name for home in folder.homes.iterdir() if any(home.iterdir())))
    return ()
