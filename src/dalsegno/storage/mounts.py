"""Compute what each host of a cluster exports and mounts, and render /etc/exports.d and /etc/fstab. Pure.

On real hosts, the head serves storage of type `folder` over NFS. It also serves storage of type `nfs` whose server is
the head. Virtual hosts bind-mount folders of their machine instead (`targets/local/storage.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dalsegno.spec.facts import Cluster, Storage

EXPORTED = "/srv/dalsegno"  # the head's folder for storage that has no `source`
EXPORTS_FILE = "/etc/exports.d/dalsegno-{cluster}.exports"  # separate, because /etc/exports is the administrator's
EXPORT_OPTIONS = ("rw", "sync", "no_subtree_check", "root_squash")
# With `hard`, a client waits for an unreachable server instead of returning errors. With `nofail`, a host boots anyway.
MOUNT_OPTIONS = ("hard", "noatime", "_netdev", "nofail", "x-systemd.mount-timeout=60")
LUSTRE_OPTIONS = ("flock", "noatime", "_netdev", "nofail", "x-systemd.mount-timeout=120")


@dataclass(frozen=True)
class NfsExport:
    """A folder that the head serves over NFS, and the addresses or networks that may mount the folder."""

    name: str
    folder: str
    clients: tuple[str, ...]
    options: tuple[str, ...] = EXPORT_OPTIONS
    home: bool = False  # whether it contains home folders; otherwise every user may create files in it


@dataclass(frozen=True)
class MountPlan:
    """A file system that a host mounts: source, mount point, type and options as in fstab(5)."""

    name: str
    source: str
    mount: str
    fstype: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostStorage:
    """The storage of one host. `packages` are names of Debian packages. `existing` are mount points to check, not to
    change."""

    exports: tuple[NfsExport, ...] = ()
    mounts: tuple[MountPlan, ...] = ()
    existing: tuple[str, ...] = ()
    scratch: str = ""  # the base of jobs' scratch folders, which belongs to root and has mode 0755

    @property
    def packages(self) -> tuple[str, ...]:
        server = ("nfs-kernel-server",) if self.exports else ()
        client = ("nfs-common",) if any(mount.fstype == "nfs" for mount in self.mounts) else ()
        return (*server, *client)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders to create before anything is exported or mounted."""
        return tuple(dict.fromkeys([*(each.folder for each in self.exports), *(each.mount for each in self.mounts)]))


def host_storage(cluster: Cluster, host: str, addresses: dict[str, str]) -> HostStorage:
    """Return the storage of a host. `addresses` are those of all hosts of the cluster, by name."""
    head, is_head = cluster.head, host == cluster.head
    server, exports, mounts = addresses.get(head, head), list[NfsExport](), list[MountPlan]()
    for storage in cluster.storage:
        served = _served_folder(storage, {head, server})
        if served and is_head:
            clients = tuple(dict.fromkeys(address for name, address in addresses.items() if name != head))
            exports.append(NfsExport(storage.name, served, clients, home=storage.home))
            if served != storage.mount:
                mounts.append(MountPlan(storage.name, served, storage.mount, "none", ("bind", "nofail")))
        elif served:
            mounts.append(_nfs(storage, f"{server}:{served}"))
        elif storage.type == "nfs":
            mounts.append(_nfs(storage, storage.source))
        elif storage.type == "lustre":
            options = _with(LUSTRE_OPTIONS, storage.options)
            mounts.append(MountPlan(storage.name, storage.source, storage.mount, "lustre", options))
    nodes = {node.name for node in cluster.nodes}
    return HostStorage(
        tuple(exports),
        tuple(mounts),
        existing=tuple(storage.mount for storage in cluster.storage if storage.type == "existing"),
        scratch=next((each.mount for each in cluster.storage if each.type == "scratch" and host in nodes), ""),
    )


def _served_folder(storage: Storage, head: set[str]) -> str:
    """Return the folder that the head serves for this storage; "" if another server serves it, or if it is not on
    NFS."""
    if storage.type == "folder":
        return storage.source or f"{EXPORTED}/{storage.name}"
    server, _, path = storage.source.partition(":")
    return path if storage.type == "nfs" and server in head else ""


def _nfs(storage: Storage, source: str) -> MountPlan:
    return MountPlan(storage.name, source, storage.mount, "nfs", _with(MOUNT_OPTIONS, storage.options))


def _with(defaults: Sequence[str], given: str) -> tuple[str, ...]:
    """Return the default options and the given ones. A given option replaces its opposite: `soft` replaces `hard`."""
    own = [option for option in given.split(",") if option]
    against = {"soft": "hard", "hard": "soft", "relatime": "noatime", "strictatime": "noatime", "noflock": "flock"}
    gone = {against.get(option, "") for option in own} | {option.partition("=")[0] for option in own}
    return (*(option for option in defaults if option.partition("=")[0] not in gone), *own)


# Lines of /etc/exports.d and /etc/fstab


def render_exports(cluster: str, exports: Iterable[NfsExport]) -> str:
    """Return the file for /etc/exports.d. Only the cluster's own hosts may mount a folder."""
    lines = []
    for each in exports:
        options = ",".join(each.options)
        clients = " ".join(f"{client}({options})" for client in each.clients)
        lines += [f"{each.folder} {clients}"] if clients else []
    return _header(cluster) + "".join(f"{line}\n" for line in lines)


def _header(cluster: str) -> str:
    return f"# Storage of cluster {cluster}. Generated by Dal Segno; `dalsegno up` writes it again.\n"


def fstab_line(mount: MountPlan) -> str:
    return f"{mount.source} {mount.mount} {mount.fstype} {','.join(mount.options) or 'defaults'} 0 0"
