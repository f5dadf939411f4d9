"""The hosts that `dalsegno containers` asks, and the ways to them: of the Slurm that is here, or of a cluster file."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dalsegno.cli.silence import meaning_of
from dalsegno.errors import CommandFailed, NotThere, UsageError

if TYPE_CHECKING:
    from dalsegno.cluster import SlurmHere
    from dalsegno.containers.plugstack import Way
    from dalsegno.slurm.facts import NodeInfo


@dataclass(frozen=True)
class Site:
    """A cluster's hosts, and how each is reached."""

    own: bool  # a cluster that we made, and that its file describes
    logins: tuple[str, ...]  # where jobs are handed in
    nodes: tuple[str, ...]
    asleep: tuple[str, ...]  # powered down: a step would boot them
    routes: dict[str, tuple[Way, ...]]


def slurm_here(name: str | None) -> tuple[SlurmHere, list[NodeInfo]]:
    """The Slurm that this host is part of, and its nodes."""
    from dalsegno.cluster import find_slurm, silence

    slurm = find_slurm(name)
    if (silent := silence(slurm)) is not None:
        raise silent
    try:
        return slurm, list(slurm.client.nodes())
    except CommandFailed as fault:
        raise _no_settings() if isinstance(meaning_of(fault), NotThere) else fault from None


def steps_on(slurm: SlurmHere, nodes: Sequence[NodeInfo]) -> Way:
    """Small steps on nodes that are in service and not full."""
    from dalsegno.containers.plugstack.ways import by_srun

    closed = {node.name: why for node in nodes if (why := _closed(node))}
    partitions = {node.name: node.partitions[0] for node in nodes if node.partitions}
    return by_srun(slurm.env, partitions, closed)


def site_here(name: str | None, ssh_options: Sequence[str]) -> Site:
    """This host, and the nodes of the Slurm that it is part of."""
    from dalsegno.cluster import cluster_id, way_into
    from dalsegno.containers.plugstack import Way
    from dalsegno.containers.plugstack.ways import by_ssh, here

    slurm, nodes = slurm_here(name)
    asleep = tuple(node.name for node in nodes if node.powered_down)
    inside = way_into(slurm)
    second = Way("its host", inside) if inside else by_ssh(slurm.env, ssh_options)
    this = platform.node()
    names = others(nodes, this)
    ways = (steps_on(slurm, nodes), second)
    return Site(
        bool(cluster_id(slurm.env)), (this,), names, asleep, {**dict.fromkeys(names, ways), this: (here(slurm.env),)}
    )


def site_of(file: str, ssh_options: Sequence[str]) -> Site:
    """The machines of a cluster file, over ssh: from anywhere, without a Slurm here."""
    from dalsegno.containers.plugstack.ways import by_ssh
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
    way = by_ssh(os.environ, ssh_options, hosts_of(spec.ssh or Ssh(), (*logins, *nodes)))
    return Site(False, logins, nodes, (), dict.fromkeys((*logins, *nodes), (way,)))


def others(nodes: Sequence[NodeInfo], this: str) -> tuple[str, ...]:
    """The nodes to ask; this host, which is asked itself, may be one of them."""
    return tuple(node.name for node in nodes if not node.powered_down and node.name != this)


def _no_settings() -> NotThere:
    return NotThere(
        "Slurm's commands are here, but no slurm.conf that they could read: this host is of no cluster",
        hint="on a login or head node there is one, or SLURM_CONF names it; with a cluster file of `target: ssh`, "
        "`dalsegno containers check FILE` asks its hosts from anywhere",
    )


def _closed(node: NodeInfo) -> str:
    """Why a step would wait there, "" if it would not."""
    if not node.in_service:
        return f"it is {node.state_text.lower() or 'out of service'}"
    return "all its CPUs are taken" if node.cpus_used >= node.cpus else ""
