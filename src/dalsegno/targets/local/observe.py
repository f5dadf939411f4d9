"""Observe a local cluster, for plans and for the status. A plan needs to know which files, hosts and services exist.
The status shows daemons as their hosts report them, and nodes and jobs as Slurm reports them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dalsegno.errors import DalsegnoError
from dalsegno.hostlist import compress
from dalsegno.slurm.client import SlurmClient
from dalsegno.slurm.facts import JobInfo, NodeInfo
from dalsegno.spec.facts import Cluster
from dalsegno.system.files import read_json, read_text
from dalsegno.system.hosts import ServiceFact, has_its_files, host_process, read_plan, service_facts
from dalsegno.targets.base import (
    ClusterPhase,
    ClusterStatus,
    ClusterSummary,
    DaemonLog,
    DaemonStatus,
    NodeStatus,
    Removal,
    job_status,
)
from dalsegno.targets.folder import read_applied
from dalsegno.targets.local.desired import Desired
from dalsegno.targets.local.directory import open_directory
from dalsegno.targets.local.fault_access import faults_of
from dalsegno.targets.local.folder import ApplyStage, ClusterState, Folder, read_state
from dalsegno.targets.local.nodes import NODE_SERVICES
from dalsegno.targets.local.placement import LOOPBACK, Placement
from dalsegno.targets.local.plan import Observed, RunningJob
from dalsegno.targets.local.storage import lost_homes, lost_storage
from dalsegno.targets.sides import node_rows
from dalsegno.users.accounts import AccountSet


def observe(folder: Folder, state: ClusterState | None, wanted: Desired, slurm: SlurmClient) -> Observed:
    """Return the present state of a cluster for a plan, except its images and accounts. Nothing is changed."""
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
        binds={path.name: plan.binds for path in hosts if (plan := read_plan(path))},
    )


def _jobs_or_silence(folder: Folder, slurm: SlurmClient) -> tuple[RunningJob, ...] | None:
    try:
        return running_jobs(slurm) if controller_runs(folder) else None
    except DalsegnoError:
        return None


def controller_runs(folder: Folder) -> bool:
    """Return whether slurmctld and munged run. Without this test, Slurm's commands would wait half a minute for
    them."""
    running = {name for path in host_folders(folder) for name, fact in service_facts(path).items() if fact.running}
    return {"slurmctld", "munged"} <= running


def find_removal(folder: Folder, slurm: SlurmClient) -> Removal:
    """Return what `down` would end or delete. If the cluster is damaged, unreadable parts are left out."""
    applied = None
    with contextlib.suppress(DalsegnoError):
        applied = read_applied(folder)
    return Removal(_living_jobs(folder, slurm), lost_homes(applied, folder), lost_storage(applied, folder))


def _living_jobs(folder: Folder, slurm: SlurmClient) -> tuple[JobInfo, ...]:
    with contextlib.suppress(DalsegnoError):
        if controller_runs(folder):
            return tuple(job for job in slurm.jobs() if not job.state.ended)
    return ()


def read_directory(folder: Folder, state: ClusterState | None, wanted: Cluster) -> AccountSet | None:
    """Return the accounts in the cluster's LDAP directory; None without a directory, or if slapd does not run."""
    if state is None or not wanted.directory.ldap:
        return None
    server = service_facts(folder.host(wanted.head)).get("slapd")
    if server is None or not server.running:
        return None
    return open_directory(wanted, folder, state.placement).read()


def host_folders(folder: Folder) -> list[Path]:
    return sorted(path for path in (folder.root / "hosts").glob("*") if path.is_dir())


def running_jobs(slurm: SlurmClient) -> tuple[RunningJob, ...]:
    """Return the jobs that a change could affect. Raise an error if slurmctld does not answer, because there may be
    jobs."""
    living = [job for job in slurm.jobs() if not job.state.ended]
    return tuple(RunningJob(job.label, job.partition, frozenset(job.nodes)) for job in living)


def read_status(folder: Folder, slurm: SlurmClient) -> ClusterStatus:
    """Return the status of the cluster. Dead daemons and a silent slurmctld are reported as problems."""
    state = read_state(folder)
    applied = read_applied(folder)
    if state is None:
        return ClusterStatus(
            folder.name,
            "local",
            ClusterPhase.GONE,
            problems=("its folder holds no state: `dalsegno down` removes the rest",),
        )
    daemons = _daemons(folder)
    nodes, jobs, silence = _ask(slurm) if controller_runs(folder) else ([], None, [])
    problems = [*_advice(state, applied), *silence, *_dead(daemons), *_injected(folder), *_unbound(folder)]
    return ClusterStatus(
        folder.name,
        "local",
        _phase(state, problems, applied),
        nodes=_nodes(applied, nodes, state.placement, _off(folder, state.placement)),
        daemons=daemons,
        jobs=None if jobs is None else tuple(job_status(job) for job in jobs),
        problems=tuple(problems),
        facts=_facts(state, applied),
    )


def _unbound(folder: Folder) -> list[str]:
    names = [path.name for path in host_folders(folder) if not has_its_files(path)]
    lost = f"{compress(names)}: users or storage of the cluster are not mounted there; `dalsegno up` repairs it"
    return [lost] if names else []


def _advice(state: ClusterState, applied: Cluster | None) -> list[str]:
    if state.phase is ApplyStage.UP:
        return []
    if state.phase is not ApplyStage.MAKING:
        return ["its removal was interrupted: `dalsegno down` finishes it"]
    if applied is not None:
        return ["a change of it was interrupted: `dalsegno up` finishes it"]
    return ["it is half-made: `dalsegno up` finishes it, `dalsegno down` removes it"]


def read_summary(folder: Folder) -> ClusterSummary:
    try:
        state, applied = read_state(folder), read_applied(folder)
    except DalsegnoError:
        return ClusterSummary("local", ClusterPhase.DAMAGED, 0)
    phase = _phase(state, [], applied) if state else ClusterPhase.GONE
    if phase is ClusterPhase.UP and applied and not _is_alive(folder, applied.head):
        phase = ClusterPhase.STOPPED
    return ClusterSummary("local", phase, len(applied.nodes) if applied else 0)


def _is_alive(folder: Folder, host: str) -> bool:
    try:
        return host_process(folder.host(host)) is not None
    except DalsegnoError:
        return False


def _phase(state: ClusterState, problems: list[str], applied: Cluster | None) -> ClusterPhase:
    if state.phase is ApplyStage.REMOVING:
        return ClusterPhase.HALF_REMOVED
    if state.phase is ApplyStage.MAKING:
        return ClusterPhase.CHANGING if applied else ClusterPhase.HALF_MADE
    return ClusterPhase.DEGRADED if problems else ClusterPhase.UP


def _facts(state: ClusterState, applied: Cluster | None) -> dict[str, str]:
    accounting = {"accounting": "on" if applied.slurm.accounting else "off"} if applied else {}
    return {"Slurm": state.slurm_version.split()[-1], "hosts": state.placement.hosts, **accounting}


def _ask(slurm: SlurmClient) -> tuple[list[NodeInfo], Sequence[JobInfo] | None, list[str]]:
    """Return Slurm's nodes and jobs, and a sentence if slurmctld does not answer or some jobs could not be read."""
    try:
        nodes, queue = slurm.nodes(), slurm.queue()
        odd = f"{queue.unreadable} jobs of Slurm's queue could not be read, and are not shown"
        return nodes, queue.jobs, [odd] if queue.unreadable else []
    except DalsegnoError as error:
        return [], None, [f"slurmctld does not answer: {error.what.splitlines()[-1].strip()}"]


def _daemons(folder: Folder) -> tuple[DaemonStatus, ...]:
    """Return the daemons of all hosts, and whether each of them runs. The services of nodes come last.

    A host without daemons is listed only if it is off.
    """
    found = []
    for path in host_folders(folder):
        services = _services(path)
        facts = service_facts(path)
        alive = host_process(path) is not None
        for service in services or ():
            name = str(service["name"])
            found.append(_daemon(path.name, name, facts.get(name), alive))
        if not services and services is not None and not alive:
            found.append(DaemonStatus(path.name, "host", running=False, detail="(off)"))
    return tuple(sorted(found, key=lambda daemon: (daemon.name in NODE_SERVICES, daemon.host)))


def dead_daemons(folder: Folder) -> list[DaemonStatus]:
    """Return the daemons that do not run. Call this outside the hosts, because a host sees only its own processes."""
    return [daemon for daemon in _daemons(folder) if not daemon.running]


def _services(host: Path) -> list[dict[str, Any]] | None:
    """Return the services in a host's plan; None if there is no plan."""
    plan = read_json(host / "plan.json")
    services = plan.get("services") if isinstance(plan, dict) else None
    found = services if isinstance(services, list) else []
    return [service for service in found if isinstance(service, dict)] if isinstance(plan, dict) else None


def read_daemon_logs(folder: Folder) -> list[DaemonLog]:
    """Return the logs of all services of every host, and of the hosts' own init."""
    logs = []
    folders = host_folders(folder)
    for path in folders:
        services = _services(path)
        for service in services or ():
            kind, _, node = str(service["name"]).partition(":")
            log = Path(str(service["log"]))
            if log.parent in folders:  # otherwise another user who owns the plan could choose which files are read
                logs.append(DaemonLog(node or path.name, kind, log))
        if services is not None:
            logs.append(DaemonLog(path.name, "init", folder.log(path.name, "init")))
    return logs


def _daemon(host: str, name: str, fact: ServiceFact | None, alive: bool) -> DaemonStatus:
    kind, _, node = name.partition(":")
    detail = ""
    if not alive:
        detail = "(host is off)"
    elif fact and fact.exit_code is not None:
        detail = f"(ended with code {fact.exit_code})"
    return DaemonStatus(node or host, kind, running=fact is not None and fact.running, detail=detail)


def _dead(daemons: tuple[DaemonStatus, ...]) -> list[str]:
    dead = [f"{daemon.name} on {daemon.host} {daemon.detail}".strip() for daemon in daemons if not daemon.running]
    if not dead:
        return []
    more = f" and {len(dead) - 4} more" if len(dead) > 4 else ""
    return [f"not running: {', '.join(dead[:4])}{more}; `dalsegno up` starts what is missing"]


def _injected(folder: Folder) -> list[str]:
    """Return a sentence about injected faults, so that users do not look for other causes."""
    found = [f"{one.fault} on {one.node}" for path in host_folders(folder) for one in faults_of(folder, path.name)]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return [f"injected: {', '.join(found[:4])}{more}; `dalsegno inject --clear` undoes it"] if found else []


def _off(folder: Folder, placement: Placement) -> frozenset[str]:
    """Return the virtual hosts that are off. Slurm notices this only later."""
    names = () if placement.hosts == LOOPBACK else placement.addresses
    return frozenset(name for name in names if not _is_alive(folder, name))


def _nodes(
    applied: Cluster | None, seen: list[NodeInfo], placement: Placement, off: frozenset[str]
) -> tuple[NodeStatus, ...]:
    """Return all nodes that the cluster file or Slurm knows, with their state in Slurm, or `off`."""
    ports = placement.ports if placement.hosts == LOOPBACK else {}
    addresses = {
        name: f"{address}:{ports[name]}" if name in ports else address for name, address in placement.addresses.items()
    }
    nodes = node_rows(applied, seen, addresses)
    return tuple(replace(node, state="off", off=True) if node.name in off else node for node in nodes)
