"""What each host of a local cluster is: its address, its mounts, its services."""

from __future__ import annotations

from collections.abc import Sequence
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
    rest = [_plain(folder, REST, isolate=False, services=[services.slurmrestd(REST)])] if cluster.slurm.rest else []
    room = _plain(folder, ROOM, isolate=False, services=[services.machine_room()])
    if placement.hosts == LOOPBACK:
        own = [service for node in cluster.nodes for service in services.compute(node.name, cluster.head)]
        return [_plain(folder, cluster.head, isolate=False, services=[*services.head(), *own]), *rest, room]
    virtual = _Virtual(folder, placement, machine)
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
    machine: Machine

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
        root = self.machine.freezer
        own = {root: f"{root}/dalsegno-{self.folder.id}/{name}"} if root else {}
        return replace(self.host(name, services), cgroups=own, disks={str(self.folder.spool(name)): DISK_MIB})
