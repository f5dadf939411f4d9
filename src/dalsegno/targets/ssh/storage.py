"""Storage of a cluster on ssh hosts: folders that the head serves over NFS, mounts, and scratch disks. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dalsegno.errors import DalsegnoError, TargetError
from dalsegno.setup.inspect import HostFacts
from dalsegno.setup.machine_record import SETUP
from dalsegno.setup.node_plan import (
    HostParts,
    PlannedCommand,
    PlannedFile,
    PlannedFolder,
    PlannedMount,
    PlannedService,
    content_digest,
)
from dalsegno.spec.facts import Cluster
from dalsegno.storage.mounts import EXPORTS_FILE, fstab_line, host_storage, render_exports

FSTAB = "/etc/fstab"
NFS_SERVER = "nfs-server"
SHARED_MODE, HOMES_MODE = 0o1777, 0o755  # modes of shared folders and of the folder of homes


def storage_parts(cluster: Cluster, host: str, addresses: dict[str, str], *, debian: bool) -> HostParts:
    """Return the storage parts of one host."""
    wanted = host_storage(cluster, host, addresses)
    folders = [
        PlannedFolder(each.folder, HOMES_MODE if each.home else SHARED_MODE, keep=True) for each in wanted.exports
    ]
    files, lines = [], [fstab_line(mount) for mount in wanted.mounts]
    if lines:
        files.append(PlannedFile(FSTAB, "".join(f"{line}\n" for line in lines), block=True))
    if wanted.scratch:
        folders.append(PlannedFolder(wanted.scratch, keep=True))
    commands: tuple[PlannedCommand, ...] = ()
    services: tuple[PlannedService, ...] = ()
    if wanted.exports:
        text = render_exports(cluster.name, wanted.exports)
        files.append(PlannedFile(EXPORTS_FILE.format(cluster=cluster.name), text))
        commands, services = (_export(text),), (_nfs_server(),)
    packages = wanted.packages if debian or not wanted.packages else ("nfs-utils",)
    mounts = tuple(PlannedMount(each.mount, line) for each, line in zip(wanted.mounts, lines, strict=True))
    return HostParts(packages, tuple(folders), tuple(files), commands, services, mounts)


def _nfs_server() -> PlannedService:
    ready = ("/bin/sh", "-c", "exportfs -s >/dev/null")
    return PlannedService(NFS_SERVER, (), "", revision="1", unit="nfs-server.service", ready=ready)


def _export(exports: str) -> PlannedCommand:
    """Return the command that makes the NFS server read its exports again.

    The command creates a file with a digest of the exports in its name. So it runs only if the exports have changed.
    It need not run again after a reboot, because the NFS server reads its exports when it starts. The file is removed
    with the record of the setup.
    """
    done = f"{SETUP}/exports-{content_digest(exports)[:16]}"
    script = f"exportfs -ra && rm -f {SETUP}/exports-* && touch {done}"
    return PlannedCommand("exporting folders", ("/bin/sh", "-c", script), creates=done, after=NFS_SERVER)


def check_storage(cluster: Cluster, facts: Mapping[str, HostFacts]) -> dict[str, DalsegnoError]:
    """Return the hosts that cannot provide the storage of the cluster file, with the reason for each."""
    faults: dict[str, DalsegnoError] = {}
    addresses = {host.name: host.address for host in cluster.ssh.hosts}
    for host, each in facts.items():
        wanted = host_storage(cluster, host, addresses)
        if wanted.exports and not each.systemd:
            faults[host] = TargetError(
                f"{host}: it has no systemd, which an NFS server needs",
                hint="use `type: existing` or `type: nfs` with a server of your own, or another machine as head",
            )
        for mount in (
            each.mount for each in wanted.mounts if f"{_login_home(cluster, host)}/".startswith(f"{each.mount}/")
        ):
            faults[host] = TargetError(
                f"{host}: storage at {mount} would hide the home and the keys of the user that Dal Segno logs in as",
                hint="choose another mount point, such as `/people`, or log in as root: `ssh: {user: root}`",
            )
        for mount in wanted.existing:
            if not _is_mounted(each, mount):
                faults[host] = TargetError(
                    f"{host}: nothing is mounted at {mount}",
                    hint="mount it on that machine first, or correct `storage:` in the cluster file",
                )
    return faults


def _login_home(cluster: Cluster, host: str) -> str:
    access = cluster.ssh.host(host)
    return f"/home/{access.user}" if access and access.user != "root" else "/root"


def _is_mounted(facts: HostFacts, path: str) -> bool:
    """Return whether a path is on another file system than the root file system of the machine."""
    return any(disk.mount != "/" and f"{path}/".startswith(f"{disk.mount.rstrip('/')}/") for disk in facts.disks)
