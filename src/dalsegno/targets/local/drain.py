"""Waiting for Slurm: jobs that must end before their node goes, nodes that must register before we are done."""

from __future__ import annotations

import time
from collections.abc import Callable

from dalsegno.errors import TargetError
from dalsegno.hostlist import compress
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.node_info import NodeInfo
from dalsegno.slurm.states import NodeState
from dalsegno.targets.base import Say
from dalsegno.targets.local.daemons import log_tail
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.observe import running_jobs
from dalsegno.targets.local.plan import LocalPlan

REGISTER_S = 120.0
REMOVAL_REASON = "dalsegno:remove"
# Reasons that Slurm itself gives to a node that was away: a host that `up` has booted again is meant to be back.
AWAY = ("not responding", "node unexpectedly rebooted", "none")


def drain_and_wait(slurm: SlurmClient, plan: LocalPlan, say: Say) -> None:
    """Let nothing new onto what is to go, and wait for what runs there; Ctrl-C stops the waiting, not the jobs."""
    for partition in plan.remove_partitions:
        slurm.update(PartitionName=partition, State="DRAIN")
    if plan.remove_nodes:
        slurm.drain(plan.remove_nodes, REMOVAL_REASON)
    said: list[str] = []
    while jobs := [
        job.id for job in running_jobs(slurm)
        if job.nodes & set(plan.remove_nodes) or job.partition in plan.remove_partitions
    ]:  # fmt: skip
        if jobs != said:
            say(f"waiting for job {', '.join(jobs)} to end (Ctrl-C stops waiting; `dalsegno up` again goes on)")
            said = jobs
        time.sleep(0.5)


def wait_for_nodes(slurm: SlurmClient, plan: LocalPlan, folder: Folder) -> None:
    """Until every node has registered; hosts that were booted again are taken back into service."""
    wanted = {node.name for node in plan.cluster.nodes}
    _wait(lambda: not _missing(slurm, plan, wanted), lambda: _complaint(slurm, plan, folder, wanted))


def _missing(slurm: SlurmClient, plan: LocalPlan, wanted: set[str]) -> set[str]:
    nodes = {node.name: node for node in slurm.nodes()}
    for node in nodes.values():
        if _is_back(node) and (node.name in plan.boot or plan.placement.hosts == "loopback"):
            slurm.resume(node.name)
    return wanted - {name for name, node in nodes.items() if is_registered(node)}


def is_registered(node: NodeInfo) -> bool:
    return node.state not in (NodeState.UNKNOWN, NodeState.FUTURE) and node.responding


def _is_back(node: NodeInfo) -> bool:
    """Out of service only because it was away or because an `up` was about to remove it, and answering."""
    away = node.down and (not node.reason or node.reason.lower().startswith(AWAY))
    return node.responding and (away or (node.draining and node.reason.startswith(REMOVAL_REASON)))


def _wait(done: Callable[[], bool], complaint: Callable[[], TargetError]) -> None:
    until = time.monotonic() + REGISTER_S
    pause_s = 0.01
    while not done():
        if time.monotonic() > until:
            raise complaint()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.25)


def _complaint(slurm: SlurmClient, plan: LocalPlan, folder: Folder, wanted: set[str]) -> TargetError:
    missing = sorted(_missing(slurm, plan, wanted))
    log = str(folder.log(missing[0], "slurmd"))
    return TargetError(
        f"{len(missing)} nodes did not register within {REGISTER_S:.0f} s: {compress(missing)}; "
        f"the end of {missing[0]}'s log:\n{log_tail(log)}",
        where=log,
    )
