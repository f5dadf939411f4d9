"""The status of a cluster on ParallelCluster, from the answers of `pcluster` and from Slurm on the head node."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.targets.base import ClusterPhase, ClusterStatus, counted
from dalsegno.targets.cloud.progress import OperationState
from dalsegno.targets.parallelcluster.client import FleetStatus, PclusterInstance, PclusterView
from dalsegno.targets.parallelcluster.folder import PclusterStage, PclusterState
from dalsegno.targets.sides import ask_slurm, node_rows

KIND = "parallelcluster"


def read_status(
    name: str,
    state: PclusterState | None,
    applied: Cluster | None,
    there: PclusterView | None,
    machines: Sequence[PclusterInstance],
    slurm: SlurmClient | None,
    silence: str = "",
    start: str = "",
) -> ClusterStatus:
    """Return the status, even if the cluster is broken. If `slurm` is None, the states of nodes are unknown.

    `silence` says why ParallelCluster did not answer. The status then comes from the state folder alone. `start` is the
    command that starts the compute nodes.
    """
    if state is None:
        gone = "its folder holds no state: `dalsegno down` removes the rest"
        return ClusterStatus(name, KIND, ClusterPhase.GONE, problems=(gone,))
    seen = ask_slurm(slurm)
    problems = [silence] if silence else [*_problems(state, there, applied, start), *seen.problems]
    facts = {"region": state.region, "ParallelCluster": state.version, "connection": "ssh" if state.key else "SSM"}
    if there is not None:
        running = sum(each.running for each in machines if each.queue)
        facts |= {
            "status": there.status.value,
            "compute nodes": there.fleet.value,
            "head": there.head_address,
            "machines": f"{counted(running, 'compute node')} of {len(applied.nodes) if applied else 0} run",
        }
        if there.login_addresses:
            facts["login"] = ", ".join(there.login_addresses)
    return ClusterStatus(
        name,
        KIND,
        _phase(state, there is not None or bool(silence), applied, problems),
        nodes=node_rows(applied, seen.nodes),
        jobs=seen.jobs,
        problems=tuple(problems),
        facts=facts,
    )


def _problems(state: PclusterState, there: PclusterView | None, applied: Cluster | None, start: str) -> list[str]:
    if state.phase is PclusterStage.REMOVING:
        return ["its removal was interrupted: `dalsegno down` finishes it"]
    found = []
    if there is None and state.phase is PclusterStage.UP:
        found.append("ParallelCluster does not know it any more: `dalsegno up` creates it again")
    elif state.phase is not PclusterStage.UP:
        what = "a change of it" if applied else "its creation"
        found.append(f"{what} is not complete: `dalsegno up` continues, `dalsegno down` removes it")
    if there is not None:
        found += [f"ParallelCluster reports {each}" for each in there.failures]
        if there.status.operation is OperationState.FAILED:
            found.append(f"ParallelCluster says {there.status.value}")
        if there.fleet is FleetStatus.PROTECTED:
            found.append("its compute nodes failed to boot ten times in a row (protected mode)")
        if there.fleet is FleetStatus.STOPPED:
            found.append(f"its compute nodes are stopped: `{start}` starts them")
    return found


def phase_of(state: PclusterState | None, applied: Cluster | None) -> ClusterPhase:
    """Return the phase that the state folder shows, without asking AWS."""
    if state is None:
        return ClusterPhase.GONE
    if state.phase is PclusterStage.REMOVING:
        return ClusterPhase.HALF_REMOVED
    if state.phase is PclusterStage.UP:
        return ClusterPhase.UP
    return ClusterPhase.CHANGING if applied else ClusterPhase.HALF_MADE


def _phase(state: PclusterState, exists: bool, applied: Cluster | None, problems: Sequence[str]) -> ClusterPhase:
    phase = phase_of(state, applied)
    if phase is not ClusterPhase.UP:
        return phase
    if not exists:
        return ClusterPhase.STOPPED
    return ClusterPhase.DEGRADED if problems else ClusterPhase.UP
