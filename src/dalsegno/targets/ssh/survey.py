"""Inspect the hosts before a plan is made: what they are, and which of them can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.delivery import Answer, ChangeKind, CodeBundle, CodeFit, applier_argv, find_bundle, read_answer
from dalsegno.setup.inspect import HostFacts, inspect_hosts
from dalsegno.setup.wheels import fetch_wheels
from dalsegno.spec.facts import Cluster
from dalsegno.system.processes import LocalRunner
from dalsegno.system.ssh import HostRunner
from dalsegno.targets.ssh.desired import tracks_with_cgroups
from dalsegno.targets.ssh.directory import DIRECTORY_PORTS, check_directory
from dalsegno.targets.ssh.folder import SshStage, SshState
from dalsegno.targets.ssh.logins import check_job_logins
from dalsegno.targets.ssh.monitoring import MONITOR_PORTS
from dalsegno.targets.ssh.people import AssignedIds, check_accounts, known_ids
from dalsegno.targets.ssh.plan import check_hosts, check_monitoring, check_releases, foreign_programs
from dalsegno.targets.ssh.programs import check_containers
from dalsegno.targets.ssh.releases import all_packages
from dalsegno.targets.ssh.services import HEAD_PORTS, NODE_PORTS
from dalsegno.targets.ssh.storage import check_storage

COMPARE_S = 120.0


def inspect_cluster(
    hosts: HostRunner, cluster: Cluster, ids: AssignedIds
) -> tuple[dict[str, HostFacts], dict[str, DalsegnoError], AssignedIds]:
    """Return the facts of usable hosts, the errors of other hosts, and the ids that users and groups already have."""
    seen = inspect_hosts(hosts, cluster.ssh.names, all_packages(cluster.ssh))
    faults = {host: each for host, each in seen.items() if isinstance(each, DalsegnoError)}
    facts = {host: each for host, each in seen.items() if not isinstance(each, DalsegnoError)}
    ids = known_ids(cluster, facts, ids)
    faults |= {**check_accounts(cluster, facts, ids), **check_storage(cluster, facts)}
    tracked = tracks_with_cgroups(facts[node.name] for node in cluster.nodes if node.name in facts)
    faults |= check_directory(cluster, facts)
    faults |= check_job_logins(cluster, facts, tracked=tracked)
    faults |= {**check_monitoring(cluster, facts), **check_hosts(cluster, facts)}
    monitor_ports = MONITOR_PORTS if cluster.monitoring.prometheus else ()
    head_ports = (*HEAD_PORTS, *(DIRECTORY_PORTS if cluster.directory.ldap else ()))
    foreign = {
        host: foreign_programs(host, each, (*(head_ports if host == cluster.head else NODE_PORTS), *monitor_ports))
        for host, each in facts.items()
        if not each.record
    }
    faults |= {host: fault for host, fault in foreign.items() if fault is not None and host not in faults}
    used = {host: each for host, each in facts.items() if host not in faults}
    faults |= {**check_releases(cluster, used), **check_containers(cluster, used)}
    return {host: each for host, each in used.items() if host not in faults}, faults, ids


def code_for_hosts(
    facts: Mapping[str, HostFacts], faults: dict[str, DalsegnoError], wheels: Path, more: Sequence[str] = ()
) -> dict[str, CodeBundle]:
    """Return our code for the Python of each host, with the packages `more`.

    A host for which the code cannot be built is added to `faults`.
    """
    found: dict[CodeFit, CodeBundle | DalsegnoError] = {}
    for each in facts.values():
        fit = CodeFit(each.python[:2], each.machine)
        if fit not in found:
            found[fit] = _bundle_for(fit, wheels, more)
    code = {host: found[CodeFit(each.python[:2], each.machine)] for host, each in facts.items()}
    faults |= {
        host: TargetError(f"{host}: {each.what}", hint=each.hint)
        for host, each in code.items()
        if isinstance(each, DalsegnoError)
    }
    return {host: each for host, each in code.items() if not isinstance(each, DalsegnoError)}


def _bundle_for(fit: CodeFit, cache: Path, more: Sequence[str]) -> CodeBundle | DalsegnoError:
    if fit == CodeFit.here():
        return find_bundle(more=more)
    try:
        return find_bundle(wheels=fetch_wheels(LocalRunner(), cache, fit), more=more)
    except DalsegnoError as error:
        return error


def ask_host(hosts: HostRunner, host: str, request: bytes, facts: HostFacts | None = None) -> Answer:
    argv = applier_argv(facts.python_path) if facts else applier_argv()
    done = hosts.run(host, argv, stdin=request, root=True, timeout_s=COMPARE_S)
    return read_answer(host, done.stdout or done.stderr)


def hosts_to_upgrade(state: SshState | None, compared: Mapping[str, Answer | DalsegnoError]) -> tuple[str, ...]:
    """Return the hosts of a complete cluster whose version of our code differs from that of this machine.

    Hosts that the last `up` failed to set up are left out.
    """
    if state is None or state.phase is not SshStage.UP:
        return ()
    known = [host for host in state.ssh.names if host not in state.failed]
    answers = {host: each for host, each in compared.items() if not isinstance(each, DalsegnoError)}
    return tuple(
        host
        for host in known
        if host in answers and any(change.kind is ChangeKind.CODE for change in answers[host].changes)
    )


def raise_for_head(cluster: Cluster, faults: Mapping[str, DalsegnoError]) -> None:
    if cluster.head in faults:
        raise faults[cluster.head]


def refuse_impossible(before: Cluster | None, wanted: Cluster) -> None:
    if before is None:
        return
    if before.slurm.accounting != wanted.slurm.accounting:
        word = "on" if wanted.slurm.accounting else "off"
        raise TargetError(
            f"accounting cannot be switched {word} while the cluster is up: job ids would be used twice",
            hint=f"`dalsegno down {wanted.name}`, then `dalsegno up`",
        )
    if before.directory != wanted.directory:
        raise TargetError(
            "`directory` cannot change while the cluster is up: users would be without accounts meanwhile",
            hint=f"`dalsegno down {wanted.name}`, then `dalsegno up`",
        )
    if before.head != wanted.head:
        raise TargetError(
            f"the head cannot move from `{before.head}` to `{wanted.head}` while the cluster is up",
            hint=f"`dalsegno down {wanted.name}`, then `dalsegno up`",
        )
