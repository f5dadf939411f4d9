"""Observe a local cluster: which of its files, hosts and services exist."""

from __future__ import annotations

from pathlib import Path

from dalsegno.errors import DalsegnoError
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.files import read_text
from dalsegno.system.hosts import has_its_files, host_process, service_facts
from dalsegno.targets.folder import read_applied
from dalsegno.targets.local.desired import Desired
from dalsegno.targets.local.fault_access import faults_of
from dalsegno.targets.local.folder import ClusterState, Folder
from dalsegno.targets.local.plan import Observed, RunningJob


def observe(folder: Folder, state: ClusterState | None, wanted: Desired, slurm: SlurmClient) -> Observed:
    """Return everything that a plan is computed from; nothing is changed."""
    if state is None:
        return Observed()
    hosts = host_folders(folder)
    return Observed(
        state=state,
        applied=read_applied(folder),
        files={name: text for name in wanted.files if (text := read_text(folder.root / name)) is not None},
        alive=frozenset(path.name for path in hosts if host_process(path) is not None),
        services={path.name: service_facts(path) for path in hosts if (path / "plan.json").exists()},
        jobs=_jobs_or_silence(folder, slurm),
        faulty=tuple(path.name for path in hosts if faults_of(folder, path.name)),
        unbound=tuple(path.name for path in hosts if not has_its_files(path)),
    )


def _jobs_or_silence(folder: Folder, slurm: SlurmClient) -> tuple[RunningJob, ...] | None:
    try:
        return running_jobs(slurm) if controller_runs(folder) else None
    except DalsegnoError:
        return None


def controller_runs(folder: Folder) -> bool:
    """Return whether slurmctld and munged run: Slurm's commands wait half a minute for one that does not."""
    running = {name for path in host_folders(folder) for name, fact in service_facts(path).items() if fact.running}
    return {"slurmctld", "munged"} <= running


def host_folders(folder: Folder) -> list[Path]:
    return sorted(path for path in (folder.root / "hosts").glob("*") if path.is_dir())


def running_jobs(slurm: SlurmClient) -> tuple[RunningJob, ...]:
    """Return the jobs that a change could affect; raise if slurmctld does not answer, which does not mean none."""
    living = [job for job in slurm.jobs() if not job.state.ended]
    return tuple(RunningJob(job.label, job.partition, frozenset(job.nodes)) for job in living)
