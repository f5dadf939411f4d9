"""The state of a HyperPod cluster from its API and, if ssh is set up, from Slurm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dalsegno.errors import DalsegnoError
from dalsegno.printable import one_line
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import NodeInfo
from dalsegno.spec.facts import Cluster
from dalsegno.targets.base import ClusterPhase, ClusterStatus, JobStatus, NodeStatus, job_status
from dalsegno.targets.hyperpod.answers import ClusterDescription, HyperPodStatus, InstanceStatus
from dalsegno.targets.hyperpod.connect import Reached
from dalsegno.targets.hyperpod.folder import HyperPodStage, HyperPodState
from dalsegno.targets.machines import MachineStatus
from dalsegno.targets.sides import node_rows, node_status

_PHASES = {
    HyperPodStage.MAKING: ClusterPhase.HALF_MADE,
    HyperPodStage.CHANGING: ClusterPhase.CHANGING,
    HyperPodStage.UP: ClusterPhase.UP,
    HyperPodStage.REMOVING: ClusterPhase.HALF_REMOVED,
}
NO_KEY = "Slurm is not asked: add `hyperpod: {ssh_key: ~/.ssh/id_ed25519.pub}` to the cluster file, then `dalsegno up`"


def phase_of(state: HyperPodState | None) -> ClusterPhase:
    """Return the phase that the state folder shows, without a request to AWS."""
    return _PHASES[state.phase] if state else ClusterPhase.GONE


def read_status(
    name: str,
    state: HyperPodState,
    applied: Cluster | None,
    found: ClusterDescription | None,
    reached: Sequence[Reached],
    slurm: SlurmClient | None,
) -> ClusterStatus:
    """Return the status. If Slurm does not answer, show the states that HyperPod reports for the instances."""
    nodes: dict[str, NodeInfo] = {}
    jobs: tuple[JobStatus, ...] | None = None
    partitions: set[str] | None = None
    problems = list(_problems(state, found, reached))
    if slurm is None:
        problems += [NO_KEY] if found else []
    else:
        try:
            nodes = {node.name: node for node in slurm.nodes()}
            partitions = {part.name for part in slurm.partition_settings()}
            jobs = tuple(job_status(job) for job in slurm.jobs())
        except DalsegnoError as error:
            problems.append(f"Slurm does not answer: {one_line(error.what)}")
    if partitions is not None and applied is not None:
        problems += _missing_partitions(applied, partitions)
    phase = phase_of(state)
    if phase is ClusterPhase.UP and found is None:
        phase = ClusterPhase.GONE
    elif phase is ClusterPhase.UP and problems and problems != [NO_KEY]:
        phase = ClusterPhase.DEGRADED
    facts = {"region": state.region, "HyperPod": found.status.value if found else "no such cluster"}
    rows = tuple(_row(each, nodes) for each in reached if each.instance.group not in _without_slurmd(state))
    return ClusterStatus(name, "hyperpod", phase, rows, (), jobs, tuple(problems), facts)


def unanswered_status(name: str, state: HyperPodState, applied: Cluster | None, error: DalsegnoError) -> ClusterStatus:
    """Return a status from the state folder alone, with the reason why AWS did not answer."""
    phase = phase_of(state)
    phase = ClusterPhase.DEGRADED if phase is ClusterPhase.UP else phase
    problem = f"the state on AWS is unknown: {one_line(error.what)}; {error.hint}"
    facts = {"region": state.region}
    return ClusterStatus(name, "hyperpod", phase, node_rows(applied, ()), jobs=None, problems=(problem,), facts=facts)


def _without_slurmd(state: HyperPodState) -> tuple[str, str]:
    return state.controller_group, state.login_group


def _problems(state: HyperPodState, found: ClusterDescription | None, reached: Sequence[Reached]) -> Iterator[str]:
    if found is None:
        if state.phase is HyperPodStage.UP:
            yield "HyperPod has no cluster of this name any more; `dalsegno down` removes what is left"
        return
    if found.status is HyperPodStatus.FAILED:
        yield f"HyperPod says: {one_line(found.failure or 'the last operation failed')}"
    for group in found.groups:
        if group.current_count < group.target_count:
            wanted = f"{group.current_count} of {group.target_count} instances"
            yield f"{group.name} has {wanted} ({group.instance_type}): HyperPod starts them, or waits for capacity"
    for each in reached:
        if each.instance.status is InstanceStatus.FAILURE:
            yield f"{each.names[0]} ({each.instance.id}) failed: {one_line(each.instance.message or 'no message')}"


def _missing_partitions(applied: Cluster, present: set[str]) -> list[str]:
    missing = [part.name for part in applied.partitions if part.name not in present]
    return [
        f"partition {name} is missing in Slurm; the service hyperpod-partitions on the controller adds it"
        for name in missing
    ]


def _row(each: Reached, nodes: Mapping[str, NodeInfo]) -> NodeStatus:
    instance, node = each.instance, nodes.get(each.instance.host)
    if node is None:
        state = instance.status.value.lower()
        return NodeStatus(instance.host or each.names[0], state, instance.message, (instance.group,), gpus_used=None)
    return node_status(node)


def machine_rows(reached: Sequence[Reached], slurm: SlurmClient | None) -> list[MachineStatus]:
    """Return every instance, with its state in Slurm if Slurm answers."""
    nodes: dict[str, NodeInfo] = {}
    if slurm is not None:
        try:
            nodes = {node.name: node for node in slurm.nodes()}
        except DalsegnoError:
            nodes = {}
    rows = []
    for each in reached:
        instance, node = each.instance, nodes.get(each.instance.host)
        detail = node.reason if node and node.reason else instance.message
        state = node.word if node else ""
        rows.append(
            MachineStatus(
                each.names[0],
                instance.host,
                instance.id,
                instance.group,
                instance.instance_type,
                instance.status.value,
                state,
                detail,
            )
        )
    return rows
