"""What each host of a local cluster is: its address, its mounts, its services."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dalsegno.spec.facts import Cluster
from dalsegno.system.hosts import HostPlan, Service
from dalsegno.system.machine import Machine
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import BACKUP, LOOPBACK, REST, ROOM, SWITCH, Placement
from dalsegno.targets.local.services import Services

DISK_MIB = 64  # of a virtual host: scripts and credentials of jobs lie there, and nothing else


def host_plans(
    cluster: Cluster, folder: Folder, placement: Placement, machine: Machine, services: Services
) -> list[HostPlan]:
    """Loopback: one host that holds every daemon. Virtual: a switch, the head, and a host for everything else."""
    plans = _host_plans(cluster, folder, placement, machine, services)
    return [_with_cgroups(plan, folder, machine, {node.name for node in cluster.nodes}) for plan in plans]


def _with_cgroups(plan: HostPlan, folder: Folder, machine: Machine, nodes: Collection[str]) -> HostPlan:
    """Return the plan with the host's place among control groups.

    With cgroup v2 there is one hierarchy, and every host has a folder in it. With v1 compute hosts have one in the
    freezer's, the only one that Slurm needs to track processes. Only root may make folders, or scopes of the system.
    """
    tree = machine.cgroups
    if not machine.is_root:
        return plan
    place = tree.place(folder.id)
    in_unit = replace(plan, unit=place.unit, unit_folders=place.unit_folders)
    if place.base and (tree.version == 2 or (plan.isolate and plan.name in nodes)):
        return replace(in_unit, cgroups={tree.root: f"{place.base}/{plan.name}"}, unified=tree.version == 2)
    return in_unit


def _host_plans(
    cluster: Cluster, folder: Folder, placement: Placement, machine: Machine, services: Services
) -> list[HostPlan]:
    rest = [_plain(folder, REST, isolate=False, services=[services.slurmrestd(REST)])] if cluster.slurm.rest else []
    room = _plain(folder, ROOM, isolate=False, services=[services.machine_room()])
    if placement.hosts == LOOPBACK:
        own = [service for node in cluster.nodes for service in services.compute(node.name, cluster.head)]
        return [_plain(folder, cluster.head, isolate=False, services=[*services.head(), *own]), *rest, room]
    virtual = _Virtual(folder, placement)
    backup = [virtual.head(BACKUP, [services.slurmctld(BACKUP)])] if cluster.slurm.backup_controller else []
    return [
        _plain(folder, SWITCH, isolate=True),
        virtual.head(cluster.head, services.head()),
        *backup,
        *rest,
        room,
        *(virtual.host(name) for name in cluster.logins),
        *(virtual.compute(node.name, services.compute(node.name, node.name)) for node in cluster.nodes),
    ]


def _plain(folder: Folder, name: str, *, isolate: bool, services: Sequence[Service] = ()) -> HostPlan:
    path = folder.host(name)
    return HostPlan(name, str(path), str(path / "init.log"), isolate, services=tuple(services))


@dataclass(frozen=True)
class _Virtual:
    folder: Folder
    placement: Placement

    def host(self, name: str, services: Sequence[Service] = ()) -> HostPlan:
        bits = self.placement.subnet.partition("/")[2]
        binds = tuple((str(self.folder.etc / file), f"/etc/{file}") for file in ("hosts", "passwd", "group"))
        plain = _plain(self.folder, name, isolate=True, services=services)
        return replace(plain, address=f"{self.placement.addresses[name]}/{bits}", binds=binds)

    def head(self, name: str, services: Sequence[Service]) -> HostPlan:
        """Pid files of its own: slurmctld's name for them is one for the whole cluster."""
        host = self.host(name, services)
        return replace(host, binds=(*host.binds, (str(self.folder.host(name) / "pid"), str(self.folder.pids))))

    def compute(self, name: str, services: Sequence[Service]) -> HostPlan:
        return replace(self.host(name, services), disks={str(self.folder.spool(name)): DISK_MIB})
