"""The status of a cluster on ssh hosts, from Slurm and from the daemons of its machines."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.errors import DalsegnoError
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, NodeInfo
from dalsegno.spec.facts import Cluster, Node
from dalsegno.targets.base import ClusterPhase, ClusterStatus, DaemonStatus, NodeStatus, job_status, named
from dalsegno.targets.folder import ClusterFolder
from dalsegno.targets.ssh.folder import SshStage, SshState


def gone(folder: ClusterFolder) -> ClusterStatus:
    problem = "its folder holds no state: `dalsegno down` removes the rest"
    return ClusterStatus(folder.name, "ssh", ClusterPhase.GONE, problems=(problem,))


def read_status(
    state: SshState,
    name: str,
    applied: Cluster | None,
    slurm: SlurmClient | None,
    daemons: Sequence[DaemonStatus],
    problems: Sequence[str] = (),
) -> ClusterStatus:
    """Return the status. A slurmctld that does not answer is part of it; None: it cannot be asked."""
    nodes, jobs, silence = _ask(slurm) if slurm else ([], None, [])
    found = [*_advice(state, applied), *problems, *silence, *_dead(daemons)]
    hosts = state.ssh.hosts or (applied.ssh.hosts if applied else ())
    addresses = {host.name: host.address for host in hosts}
    accounting = {"accounting": "on" if applied.slurm.accounting else "off"} if applied else {}
    return ClusterStatus(
        name,
        "ssh",
        phase_of(state, applied, found),
        nodes=_nodes(applied, nodes, addresses),
        daemons=tuple(daemons),
        jobs=None if jobs is None else tuple(job_status(job) for job in jobs),
        problems=tuple(found),
        facts={"Slurm": state.slurm_version, "head": state.head, **accounting},
    )


def phase_of(state: SshState, applied: Cluster | None, problems: Sequence[str]) -> ClusterPhase:
    if state.phase is SshStage.REMOVING:
        return ClusterPhase.HALF_REMOVED
    if state.phase is SshStage.MAKING:
        return ClusterPhase.CHANGING if applied else ClusterPhase.HALF_MADE
    return ClusterPhase.DEGRADED if problems else ClusterPhase.UP


def _advice(state: SshState, applied: Cluster | None) -> list[str]:
    if state.phase is SshStage.REMOVING:
        return ["its removal was interrupted: `dalsegno down` finishes it"]
    if state.phase is SshStage.MAKING and applied is not None:
        return ["a change of it was interrupted: `dalsegno up` finishes it"]
    if state.phase is SshStage.MAKING:
        return ["it is half-made: `dalsegno up` finishes it, `dalsegno down` removes it"]
    failed = f"the last `up` did not complete {named('host', state.failed)}: `dalsegno up` repairs it"
    return [failed] if state.failed else []


def _ask(slurm: SlurmClient) -> tuple[list[NodeInfo], Sequence[JobInfo] | None, list[str]]:
    try:
        return slurm.nodes(), slurm.queue().jobs, []
    except DalsegnoError as error:
        return [], None, [f"slurmctld does not answer: {error.what.splitlines()[-1].strip()}"]


def _dead(daemons: Sequence[DaemonStatus]) -> list[str]:
    dead = [f"{daemon.name} on {daemon.host}" for daemon in daemons if not daemon.running]
    more = f" and {len(dead) - 4} more" if len(dead) > 4 else ""
    return [f"not running: {', '.join(dead[:4])}{more}; `dalsegno up` starts what is missing"] if dead else []


def _nodes(applied: Cluster | None, seen: Sequence[NodeInfo], addresses: dict[str, str]) -> tuple[NodeStatus, ...]:
    known: dict[str, Node] = {node.name: node for node in applied.nodes} if applied else {}
    info = {node.name: node for node in seen}
    return tuple(
        _node(name, known.get(name), info.get(name), applied, addresses) for name in dict.fromkeys([*known, *info])
    )


def _node(
    name: str, fact: Node | None, info: NodeInfo | None, applied: Cluster | None, addresses: dict[str, str]
) -> NodeStatus:
    return NodeStatus(
        name,
        state=info.word if info else "unknown",
        reason=info.reason if info else "",
        reason_user=info.reason_user if info else "",
        partitions=tuple(part.name for part in applied.partitions if name in part.nodes) if applied else (),
        gpus=info.gpus if info else fact.gpus if fact else 0,
        gpus_used=info.gpus_used if info else None,
        gpu_type=fact.gpu_type if fact else "",
        address=addresses.get(name, ""),
        spare=fact.spare if fact else False,
    )
