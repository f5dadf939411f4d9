"""Drain nodes before they are removed, set lost nodes down, and wait until all nodes have registered with Slurm."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dalsegno.errors import TargetError
from dalsegno.hostlist import compress
from dalsegno.slurm.client import SlurmClient
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.hosts import host_process
from dalsegno.targets.base import Say
from dalsegno.targets.local.daemons import log_tail, raise_if_dead
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.observe import controller_runs, running_jobs
from dalsegno.targets.local.plan import LocalPlan
from dalsegno.targets.registration import (
    BOOT_REASON,
    REGISTER_S,
    REMOVAL_REASON,
    is_registered,
    resume_and_find_missing,
    wait_for,
)


def drain_and_wait(slurm: SlurmClient, plan: LocalPlan, folder: Folder, say: Say) -> None:
    """Drain the nodes and partitions that will be removed, and wait until their jobs have ended.

    If the user presses Ctrl-C, the wait ends, and the jobs continue.
    """
    if not controller_runs(folder):
        _refuse_unknown_jobs(plan, folder)
        return
    nodes = [node.name for node in slurm.nodes() if node.name in plan.remove_nodes]
    partitions = [part.name for part in slurm.partitions() if part.name in plan.remove_partitions]
    for partition in dict.fromkeys(partitions):
        slurm.update(PartitionName=partition, State="DRAIN")
    if nodes:
        slurm.drain(nodes, REMOVAL_REASON)
    reported: list[str] = []
    while jobs := _jobs_on_removed(slurm, set(nodes), set(partitions)):
        if jobs != reported:
            say(f"waiting for job {', '.join(jobs)} to end (Ctrl-C stops waiting; `dalsegno up` continues)")
            reported = jobs
        time.sleep(0.5)


def _jobs_on_removed(slurm: SlurmClient, nodes: set[str], partitions: set[str]) -> list[str]:
    """Return the jobs on nodes and partitions that will be removed. Raise an error if a pending job would never
    start."""
    jobs = [job for job in running_jobs(slurm) if job.nodes & nodes or job.partition in partitions]
    waiting = [job.id for job in jobs if not job.nodes]
    if waiting:
        raise TargetError(
            f"job {', '.join(waiting)} is pending in a partition that will be removed",
            hint=f"scancel {' '.join(waiting)}, or move it: scontrol update job={waiting[0]} partition=NAME",
        )
    return [job.id for job in jobs]


def _refuse_unknown_jobs(plan: LocalPlan, folder: Folder) -> None:
    """Raise an error if slurmctld does not run but hosts to be removed do, because the jobs on them are unknown."""
    alive = [name for name in plan.remove_nodes if host_process(folder.host(name)) is not None]
    if alive:
        raise TargetError(
            f"slurmctld does not answer, so the jobs on {compress(alive)} are unknown",
            hint="run `dalsegno up` with the old file first, then remove the nodes",
        )


def set_down_and_wait(slurm: SlurmClient, nodes: Sequence[str], folder: Folder) -> None:
    """Set lost nodes down, and wait until Slurm has removed them from their jobs.

    This must be done before the hosts boot again. Otherwise Slurm would end these jobs.
    """
    if not nodes or not controller_runs(folder):
        return
    slurm.set_down(nodes, BOOT_REASON)
    gone = set(nodes)
    wait_for(
        lambda: not any(job.nodes & gone for job in running_jobs(slurm)),
        lambda: TargetError(f"Slurm did not remove {compress(nodes)} from its jobs", hint="run `dalsegno up` again"),
    )


def wait_for_nodes(slurm: SlurmClient, plan: LocalPlan, folder: Folder, since: float) -> None:
    """Wait until every node has registered. Resume nodes that are back, such as those whose hosts were booted again."""
    wanted = {node.name for node in plan.cluster.nodes}
    in_service = {node.name for node in plan.cluster.nodes if not node.spare}
    set_down = lost_nodes(plan)

    def all_registered() -> bool:
        missing = resume_and_find_missing(slurm, wanted, in_service, set_down)
        _raise_for_dead_slurmd(plan, missing, since)
        return not missing

    wait_for(all_registered, lambda: _registration_error(folder, _still_missing(slurm, wanted)))


def _raise_for_dead_slurmd(plan: LocalPlan, missing: set[str], since: float) -> None:
    for host in plan.desired.hosts.values():
        for service in host.services:
            if service.name.startswith("slurmd") and (service.name.partition(":")[2] or host.name) in missing:
                raise_if_dead(host, service, since)


def lost_nodes(plan: LocalPlan) -> set[str]:
    """Return the existing nodes whose hosts must be booted again."""
    return {node.name for node in plan.cluster.nodes if node.name in plan.boot and node.name not in plan.add_nodes}


def _still_missing(slurm: SlurmClient, wanted: set[str]) -> list[str]:
    return sorted(wanted - {node.name for node in slurm.nodes() if is_registered(node)}) or sorted(wanted)


def _registration_error(folder: Folder, missing: list[str]) -> TargetError:
    log = str(folder.log(missing[0], "slurmd"))
    return TargetError(
        f"{len(missing)} nodes did not register within {REGISTER_S * slowness():.0f} s: {compress(missing)}; "
        f"the end of {missing[0]}'s log:\n{log_tail(log)}",
        where=log,
        hint="`dalsegno status` shows the daemons; `dalsegno up` again starts what is missing",
    )
