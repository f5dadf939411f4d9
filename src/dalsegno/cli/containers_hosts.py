"""The hosts that `dalsegno containers` asks, and the routes to them: of the local Slurm, or of a cluster file."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dalsegno.cli.controller_requests import meaning_of
from dalsegno.errors import CommandFailed, NotThere, UsageError

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.containers.plugstack import HostRoute
    from dalsegno.slurm.facts import NodeInfo


@dataclass(frozen=True)
class CheckedHosts:
    """The hosts of a cluster, and how each is reached."""

    own: bool  # `dalsegno up` made this cluster from a cluster file
    logins: tuple[str, ...]  # jobs are submitted here
    nodes: tuple[str, ...]
    asleep: tuple[str, ...]  # powered down; not checked, because a job step would boot them
    routes: dict[str, tuple[HostRoute, ...]]
    here: str = ""  # the login host that this process runs on


def slurm_here(name: str | None) -> tuple[SlurmHere, list[NodeInfo]]:
    """Return the Slurm that this host belongs to, and its nodes."""
    from dalsegno.cluster import find_slurm, silence

    slurm = find_slurm(name)
    if (silent := silence(slurm)) is not None:
        raise silent
    try:
        return slurm, list(slurm.client.nodes())
    except CommandFailed as fault:
        raise _no_settings() if isinstance(meaning_of(fault), NotThere) else fault from None


def steps_on(slurm: SlurmHere, nodes: Sequence[NodeInfo]) -> HostRoute:
    """Return the route by small steps to nodes that are in service and not full."""
    from dalsegno.containers.plugstack.hosts import srun_route

    closed = {node.name: why for node in nodes if (why := _closed(node))}
    partitions = {node.name: node.partitions[0] for node in nodes if node.partitions}
    return srun_route(slurm.env, partitions, closed)


def hosts_here(name: str | None, ssh_options: Sequence[str]) -> CheckedHosts:
    """Return this host and the nodes of the Slurm that it belongs to."""
    from dalsegno.cluster import cluster_id, way_into
    from dalsegno.containers.plugstack import HostRoute
    from dalsegno.containers.plugstack.hosts import local_route, ssh_route

    slurm, nodes = slurm_here(name)
    asleep = tuple(node.name for node in nodes if node.powered_down)
    inside = way_into(slurm)
    second = HostRoute("its host", inside) if inside else ssh_route(slurm.env, ssh_options)
    this = platform.node()
    names = others(nodes, this)
    routes = {**dict.fromkeys(names, (steps_on(slurm, nodes), second)), this: (local_route(slurm.env),)}
    return CheckedHosts(bool(cluster_id(slurm.env)), (this,), names, asleep, routes, here=this)


def hosts_in(file: str, ssh_options: Sequence[str]) -> CheckedHosts:
    """Return the hosts of a cluster file, reached over ssh. The calling host does not need Slurm."""
    from dalsegno.containers.plugstack.hosts import ssh_route
    from dalsegno.spec.load import load_spec
    from dalsegno.spec.resolve import resolve
    from dalsegno.spec.targets import Ssh, hosts_of

    spec = load_spec(file)
    cluster = resolve(spec)
    if cluster.target != "ssh":
        raise UsageError(
            f"{file} names no hosts that are reached over ssh: its target is `{cluster.target}`",
            hint="on the cluster's login or head node, `dalsegno containers check` needs no file",
        )
    logins = (cluster.head, *cluster.logins)
    nodes = tuple(node.name for node in cluster.nodes if node.name not in logins)
    route = ssh_route(os.environ, ssh_options, hosts_of(spec.ssh or Ssh(), (*logins, *nodes)))
    return CheckedHosts(False, logins, nodes, (), dict.fromkeys((*logins, *nodes), (route,)))


def others(nodes: Sequence[NodeInfo], this: str) -> tuple[str, ...]:
    """Return the nodes to ask besides this host, which may be one of them."""
    return tuple(node.name for node in nodes if not node.powered_down and node.name != this)


def _no_settings() -> NotThere:
    return NotThere(
        "Slurm's commands are installed here, but they find no slurm.conf: this host belongs to no cluster",
        hint="run this on a login or head node, or set SLURM_CONF; with a cluster file of `target: ssh`, "
        "`dalsegno containers check FILE` works from anywhere",
    )


def _closed(node: NodeInfo) -> str:
    """Return why a step would wait on a node, "" if it would not."""
    if not node.in_service:
        return f"it is {node.state_text.lower() or 'out of service'}"
    return "all its CPUs are taken" if node.cpus_used >= node.cpus else ""
