"""The status of a cluster on ssh hosts, from Slurm and from the daemons of its machines."""

from __future__ import annotations

from collections.abc import Sequence

from dalsegno.slurm.client import SlurmClient
from dalsegno.spec.facts import Cluster
from dalsegno.targets.base import ClusterPhase, ClusterStatus, DaemonStatus, named
from dalsegno.targets.folder import ClusterFolder
from dalsegno.targets.sides import ask_slurm, node_rows
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
    """Return the status. If slurmctld does not answer, the status says so. If `slurm` is None, slurmctld is not
    asked."""
    seen = ask_slurm(slurm)
    found = [*_advice(state, applied), *problems, *seen.problems, *_dead(daemons)]
    hosts = state.ssh.hosts or (applied.ssh.hosts if applied else ())
    addresses = {host.name: host.address for host in hosts}
    accounting = {"accounting": "on" if applied.slurm.accounting else "off"} if applied else {}
    return ClusterStatus(
        name,
        "ssh",
        phase_of(state, applied, found),
        nodes=node_rows(applied, seen.nodes, addresses),
        daemons=tuple(daemons),
        jobs=seen.jobs,
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
    skipped = f"the last `up` did not get to {named('host', state.skipped)}: run it again"
    return [line for line, names in ((failed, state.failed), (skipped, state.skipped)) if names]


def _dead(daemons: Sequence[DaemonStatus]) -> list[str]:
    dead = [f"{daemon.name} on {daemon.host}" for daemon in daemons if not daemon.running]
    more = f" and {len(dead) - 4} more" if len(dead) > 4 else ""
    return [f"not running: {', '.join(dead[:4])}{more}; `dalsegno up` starts what is missing"] if dead else []
