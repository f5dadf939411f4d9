"""Drain nodes and wait for their jobs before the nodes are removed; wait for nodes to register with Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dalsegno.errors import TargetError
from dalsegno.hostlist import compress
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeInfo, NodeState
from dalsegno.slurm.parse.messages import is_absence
from dalsegno.slurm.render import SPARE_REASON
from dalsegno.system.hanging_calls import slowness
from dalsegno.system.hosts import host_process
from dalsegno.targets.base import Say
from dalsegno.targets.local.daemons import log_tail, raise_if_dead
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.observe import controller_runs, running_jobs
from dalsegno.targets.local.plan import LocalPlan

REGISTER_S = 120.0
REMOVAL_REASON = "dalsegno:remove"
BOOT_REASON = "dalsegno:boot"


def drain_and_wait(slurm: SlurmClient, plan: LocalPlan, folder: Folder, say: Say) -> None:
    """Drain nodes and partitions that will be removed, and wait until their jobs end. Ctrl-C stops the waiting, not the
    jobs."""
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
    """Return the jobs on nodes and partitions that will be removed. Raise if one is pending: it would never start."""
    jobs = [job for job in running_jobs(slurm) if job.nodes & nodes or job.partition in partitions]
    waiting = [job.id for job in jobs if not job.nodes]
    if waiting:
        raise TargetError(
            f"job {', '.join(waiting)} is pending in a partition that will be removed",
            hint=f"scancel {' '.join(waiting)}, or move it: scontrol update job={waiting[0]} partition=NAME",
        )
    return [job.id for job in jobs]


def _refuse_unknown_jobs(plan: LocalPlan, folder: Folder) -> None:
    """Raise if hosts to be removed still run while slurmctld does not answer: their jobs are unknown."""
    alive = [name for name in plan.remove_nodes if host_process(folder.host(name)) is not None]
    if alive:
        raise TargetError(
            f"slurmctld does not answer, so the jobs on {compress(alive)} are unknown",
            hint="run `dalsegno up` with the old file first, then remove the nodes",
        )


def set_down_and_wait(slurm: SlurmClient, nodes: Sequence[str], folder: Folder) -> None:
    """Set lost nodes down, and wait until Slurm has removed them from their jobs. If a host boots before that, Slurm
    ends these jobs."""
    if not nodes or not controller_runs(folder):
        return
    slurm.set_down(nodes, BOOT_REASON)
    gone = set(nodes)
    _wait(
        lambda: not any(job.nodes & gone for job in running_jobs(slurm)),
        lambda: TargetError(f"Slurm did not remove {compress(nodes)} from its jobs", hint="run `dalsegno up` again"),
    )


def wait_for_nodes(slurm: SlurmClient, plan: LocalPlan, folder: Folder, since: float) -> None:
    """Wait until every node has registered, and resume those whose hosts were booted again."""
    wanted = {node.name for node in plan.cluster.nodes}
    in_service = {node.name for node in plan.cluster.nodes if not node.spare}
    set_down = lost_nodes(plan)

    def all_registered() -> bool:
        missing = resume_and_find_missing(slurm, wanted, in_service, set_down)
        _raise_for_dead_slurmd(plan, missing, since)
        return not missing

    _wait(all_registered, lambda: _registration_error(folder, _still_missing(slurm, wanted)))


def _raise_for_dead_slurmd(plan: LocalPlan, missing: set[str], since: float) -> None:
    for host in plan.desired.hosts.values():
        for service in host.services:
            if service.name.startswith("slurmd") and (service.name.partition(":")[2] or host.name) in missing:
                raise_if_dead(host, service, since)


def lost_nodes(plan: LocalPlan) -> set[str]:
    """Return the nodes that are set down before their hosts are booted again."""
    return {node.name for node in plan.cluster.nodes if node.name in plan.boot and node.name not in plan.add_nodes}


def resume_and_find_missing(slurm: SlurmClient, wanted: set[str], in_service: set[str], set_down: set[str]) -> set[str]:
    """Resume nodes that have no more reason to be out of service, and return the nodes that have not registered.

    `set_down`: nodes that this `up` has set down; resumed nodes are removed from the set. While a job still ends
    on such a node, Slurm 24.11 shows the node as MIXED. A node that was just resumed counts as missing until a later
    call finds it in service: Slurm may still have it as responding from before its host was booted again.
    """
    nodes = [node for node in slurm.nodes() if node.name in wanted]
    back = {node.name for node in nodes if _is_back(node) or (node.name in set_down and node.responding)}
    resumed = back | {node.name for node in nodes if node.name in in_service and _is_spare(node)}
    for name in sorted(resumed):
        slurm.resume(name)
    set_down -= resumed
    return wanted - {node.name for node in nodes if is_registered(node) and node.name not in resumed}


def is_registered(node: NodeInfo) -> bool:
    return node.state not in (NodeState.UNKNOWN, NodeState.FUTURE) and node.responding


def _is_back(node: NodeInfo) -> bool:
    """Return whether the node responds, and is out of service only because it was off or was about to be removed."""
    away = node.down and (is_absence(node.reason) or node.reason.startswith(BOOT_REASON))
    return node.responding and (away or (node.draining and node.reason.startswith(REMOVAL_REASON)))


def _is_spare(node: NodeInfo) -> bool:
    return node.draining and node.reason.startswith(SPARE_REASON)


def _wait(done: Callable[[], bool], error: Callable[[], TargetError]) -> None:
    until = time.monotonic() + REGISTER_S * slowness()
    pause_s = 0.01
    while not done():
        if time.monotonic() > until:
            raise error()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.25)


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
