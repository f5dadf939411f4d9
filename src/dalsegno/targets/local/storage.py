"""Storage of a local cluster: folders of this machine that virtual hosts bind-mount, and scratch folders of jobs."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dalsegno.errors import TargetError
from dalsegno.programs import launcher
from dalsegno.slurm.layout import Programs
from dalsegno.spec.facts import Cluster, Storage, User
from dalsegno.storage.probe import find_mount
from dalsegno.storage.scratch import EPILOG, PROLOG, TASK_PROLOG, job_scripts, scratch_of, without_programs
from dalsegno.system.files import explain, make_folder, read_json, write_atomic
from dalsegno.system.hosts import PACKAGES
from dalsegno.system.ownership import part_of_others, trusted_owners
from dalsegno.targets.local.folder import Folder
from dalsegno.targets.local.placement import LOOPBACK, Placement
from dalsegno.users.accounts import PosixUser
from dalsegno.users.homes import install_keys, make_home

SHARED_MODE = 0o1777  # like /tmp: every user may create files, and may remove only their own


# Paths of the storage on this machine and on the hosts


def source_of(storage: Storage, folder: Folder) -> Path:
    """Return the folder of this machine that contains a storage."""
    if storage.type == "existing":
        return Path(storage.mount)
    return Path(storage.source) if storage.source else folder.storage / storage.name


def shared_binds(cluster: Cluster, folder: Folder) -> tuple[tuple[str, str], ...]:
    """Return the bind mounts that every virtual host has, as pairs of a folder on the machine and a mount point."""
    pairs = [(str(source_of(each, folder)), each.mount) for each in cluster.storage if each.type == "folder"]
    return tuple((source, mount) for source, mount in pairs if source != mount)


def node_binds(cluster: Cluster, folder: Folder, node: str) -> tuple[tuple[str, str], ...]:
    """Return the bind mount of a node's scratch disk, if there is one. A replaced machine gets a new scratch disk."""
    scratch = scratch_of(cluster)
    return ((str(folder.scratch(node)), scratch.mount),) if scratch else ()


def home_storage(cluster: Cluster) -> Storage | None:
    return next((storage for storage in cluster.storage if storage.home), None)


def homes_inside(cluster: Cluster, folder: Folder, placement: Placement) -> str:
    """Return the path of the home folders as hosts see it."""
    storage = home_storage(cluster)
    return storage.mount if storage and placement.hosts != LOOPBACK else str(folder.homes)


def homes_here(cluster: Cluster, folder: Folder) -> Path:
    """Return the path of the home folders on this machine."""
    storage = home_storage(cluster)
    return source_of(storage, folder) if storage else folder.homes


def slurm_programs(cluster: Cluster, folder: Folder, placement: Placement) -> Programs:
    """Return the programs that Slurm starts for scratch folders. On loopback ports there are none, because nodes there
    have no disks of their own."""
    if scratch_of(cluster) is None or placement.hosts == LOOPBACK:
        return Programs()
    paths = {name: str(folder.bin / name) for name in (PROLOG, EPILOG, TASK_PROLOG)}
    return Programs(prolog=paths[PROLOG], epilog=paths[EPILOG], task_prolog=paths[TASK_PROLOG])


def program_files(cluster: Cluster, folder: Folder, placement: Placement) -> dict[str, str]:
    """Return the scripts of `slurm_programs`, by their path below the state folder."""
    if placement.hosts == LOOPBACK:
        return {}
    scripts = job_scripts(cluster, launcher(), str(folder.boot_id("%n")))
    return {f"bin/{name}": text for name, text in scripts.items()}


def shown_in_containers(cluster: Cluster, folder: Folder, placement: Placement) -> tuple[str, ...]:
    """Return the paths to mount into containers: the scratch disk, and the task prolog, which Slurm starts inside the
    container."""
    scratch = scratch_of(cluster)
    return (scratch.mount, str(folder.bin / TASK_PROLOG)) if scratch and placement.hosts != LOOPBACK else ()


def without_own_programs(cluster: Cluster, placement: Placement) -> Cluster:
    """Return the cluster without the raw Slurm settings that name programs, such as `Prolog`.

    Slurm starts our programs instead, and our programs then start those that the settings named. If Slurm starts no
    programs of ours, because the nodes have no scratch folders, return the cluster unchanged.
    """
    if scratch_of(cluster) is None or placement.hosts == LOOPBACK:
        return cluster
    return replace(cluster, slurm=replace(cluster.slurm, extra=without_programs(cluster.slurm.extra)))


def storage_sentences(cluster: Cluster, folder: Folder, placement: Placement) -> list[str]:
    """Return the sentences of `plan` about the storage of a new cluster."""
    virtual = placement.hosts != LOOPBACK
    return [text for each in cluster.storage if (text := (_mounted if virtual else _not_mounted)(each, folder))]


def _mounted(storage: Storage, folder: Folder) -> str:
    if storage.type == "scratch":
        return f"gives each job a scratch folder below {storage.mount} on each of its nodes"
    if storage.type == "existing":
        return f"storage {storage.name}: hosts use {storage.mount} of this machine as it is"
    source, kept = source_of(storage, folder), "" if storage.source else "; `down` removes it"
    hidden = "" if str(source) == storage.mount or not _has_content(Path(storage.mount)) else (
        f", which hides this machine's own {storage.mount} inside the hosts"
    )  # fmt: skip
    return f"mounts {source} at {storage.mount} on all hosts (storage {storage.name}){hidden}{kept}"


def _not_mounted(storage: Storage, folder: Folder) -> str:
    """Return a sentence about storage that loopback nodes cannot mount, because they use this machine's file system."""
    if storage.type == "scratch":
        return f"no scratch folders at {storage.mount}: nodes on loopback ports have no disk of their own"
    source = source_of(storage, folder)
    if str(source) == storage.mount:
        return ""
    homes = "; users keep the home folders of this machine" if storage.home else ""
    return f"storage {storage.name} is not mounted at {storage.mount}, which needs virtual hosts: use {source}{homes}"


def _has_content(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except OSError:
        return False


# Checks before anything is changed


def check_storage(cluster: Cluster, folder: Folder, placement: Placement, mountinfo: str) -> None:
    """Raise an error if this machine cannot provide the storage, or not safely.

    For example, a mount could hide files that the hosts need, or users could replace a folder in which root works.
    """
    for storage in cluster.storage:
        if storage.type == "existing":
            _check_existing(storage, mountinfo)
        elif storage.source and not Path(storage.source).is_dir():
            raise TargetError(
                f"the folder {storage.source} of storage `{storage.name}` does not exist",
                hint=f"create it, or leave out `source`: `up` then creates a folder for `{storage.name}`",
            )
        if storage.home and os.geteuid() == 0:
            _check_homes(storage, source_of(storage, folder))
        if placement.hosts != LOOPBACK and str(source_of(storage, folder)) != storage.mount:
            _check_mount_point(storage, folder, cluster)


def _check_existing(storage: Storage, mountinfo: str) -> None:
    point, *_ = find_mount(mountinfo, os.path.realpath(storage.mount))
    if not Path(storage.mount).is_dir() or point in ("", "/"):
        raise TargetError(
            f"nothing is mounted at {storage.mount} on this machine (storage `{storage.name}`)",
            hint=f"mount it first, or use `type: folder` with `source: {storage.mount}` for a folder of this machine",
        )


def _check_homes(storage: Storage, source: Path) -> None:
    """Raise an error if users could change the folder in which root creates home folders."""
    if theirs := part_of_others(source, trusted_owners()):
        raise TargetError(
            f"users can replace {theirs}, where root would create the home folders of storage `{storage.name}`",
            hint="choose a folder for home folders that only root can change",
        )


def _check_mount_point(storage: Storage, folder: Folder, cluster: Cluster) -> None:
    mount = Path(storage.mount)
    for needed in _needed(folder, cluster):
        if needed == mount or mount in needed.parents:
            raise TargetError(
                f"storage `{storage.name}` mounted at {mount} would hide {needed}, which the hosts need",
                hint="choose another mount point, or move those files to another folder, such as /opt",
            )
    if folder.root == mount or folder.root in mount.parents:
        raise TargetError(
            f"storage `{storage.name}` would be mounted inside the cluster's state folder {folder.root}",
            hint="choose another mount point, such as `/fsx` or `/shared`",
        )
    if theirs := part_of_others(mount, {0}):
        raise TargetError(
            f"users can replace {theirs} on the way to the mount point {mount} of storage `{storage.name}`",
            hint="choose a mount point whose parent folders belong to root, such as `/fsx`",
        )
    if os.path.realpath(mount) != str(mount) or (mount.exists() and not mount.is_dir()):
        raise TargetError(
            f"the mount point {mount} of storage `{storage.name}` is not a folder, or a link leads to it",
            hint="choose another mount point, such as `/fsx` or `/shared`",
        )


def _needed(folder: Folder, cluster: Cluster) -> Iterator[Path]:
    """Yield the paths that hosts must be able to read: state folder, Dal Segno, Python, images and storage sources."""
    yield from (folder.root, Path(PACKAGES))
    for path in (sys.executable, sys.prefix, sys.base_prefix):
        yield from (Path(path), Path(os.path.realpath(path)))
    if cluster.containers.folder:
        yield Path(cluster.containers.folder)
    # A host that has lost its storage mounts the source again, so the source must stay visible.
    yield from (source_of(storage, folder) for storage in cluster.storage if storage.type != "scratch")


# Creating and removing the storage


def make_storage(cluster: Cluster, folder: Folder, placement: Placement) -> None:
    """Create the folders and mount points of the storage."""
    for storage in cluster.storage:
        if storage.type == "folder" and not storage.source:
            path = source_of(storage, folder)
            if not path.exists():
                make_folder(path)
                path.chmod(0o755 if storage.home else SHARED_MODE)
    if placement.hosts == LOOPBACK:
        return
    if scratch_of(cluster):
        for node in cluster.nodes:
            make_folder(folder.scratch(node.name))
    mounts = [mount for _, mount in shared_binds(cluster, folder)]
    make_mount_points(folder, [*mounts, *(each.mount for each in cluster.storage if each.type == "scratch")])


def make_mount_points(folder: Folder, mounts: Sequence[str]) -> None:
    """Create missing mount points on this machine, whose folders all hosts share. Record them first, for `down`.

    Mount points that another cluster created are recorded too, because the last cluster to be removed deletes them.
    """
    others = {path for each in folder.root.parent.iterdir() for path in _recorded(Folder(each))}
    missing = [path for mount in mounts for path in _missing_parts(Path(mount))]
    shared = [part for mount in mounts for part in map(str, (Path(mount), *Path(mount).parents)) if part in others]
    recorded = {*_recorded(folder), *map(str, missing), *shared}
    if recorded == {*_recorded(folder)} and not missing:
        return
    write_atomic(folder.mount_points, json.dumps(sorted(recorded)))
    for path in missing:
        try:
            path.mkdir(0o755, exist_ok=True)
            path.chmod(0o755)
        except OSError as error:
            raise explain(error, path) from error


def _missing_parts(path: Path) -> list[Path]:
    return [part for part in (*reversed(path.parents), path) if not part.exists()]


def _recorded(folder: Folder) -> list[str]:
    with contextlib.suppress(Exception):  # a damaged record must not prevent `down`, even if an empty folder is left
        found = read_json(folder.mount_points)
        return [str(path) for path in found] if isinstance(found, list) else []
    return []


def remove_mount_points(folder: Folder) -> None:
    """Remove the mount points that `up` created, if they are empty and no other cluster uses them.

    The second condition matters: the kernel would let root remove a mount point of another namespace, and unmount it
    there.
    """
    paths = _recorded(folder)
    used = _mounted_anywhere() if paths else set()
    for path in sorted(paths, key=len, reverse=True):
        if not any(point == path or point.startswith(f"{path}/") for point in used):
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _mounted_anywhere() -> set[str]:
    """Return all mount points in all mount namespaces of this machine."""
    points: set[str] = set()
    seen: set[int] = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                namespace = os.stat(f"/proc/{entry}/ns/mnt").st_ino
                if namespace not in seen:
                    seen.add(namespace)
                    text = Path(f"/proc/{entry}/mountinfo").read_text(errors="surrogateescape")
                    points |= {line.split()[4] for line in text.splitlines()}
    return points


def make_homes(homes: Path, users: Iterable[PosixUser]) -> None:
    """Create home folders for users who exist only in the cluster, and install the keys that may log in.

    A folder that belongs to somebody else is not changed. `plan` reports it.
    """
    try:
        for user in users:
            make_home(homes, user.name, user.uid, user.gid)
            if (homes / user.name).lstat().st_uid == user.uid:
                install_keys(homes, user.name, user.uid, user.gid, user.ssh_keys)
    except OSError as error:
        raise explain(error, homes) from error


def foreign_homes(cluster: Cluster, folder: Folder, placement: Placement, users: Sequence[User]) -> list[str]:
    """Return a sentence for each user whose home already exists, but belongs to somebody else or is not a folder."""
    found = []
    for name in (user.name for user in users if user.name in placement.uids):
        with contextlib.suppress(OSError):
            home = homes_here(cluster, folder) / name
            about = home.lstat()
            if not stat.S_ISDIR(about.st_mode):
                found.append(f"the home folder of {name} exists already and is not a folder: rename {home}")
            elif about.st_uid != placement.uids[name]:
                found.append(
                    f"the home folder of {name} exists already and belongs to uid {about.st_uid}, not "
                    f"{placement.uids[name]}: set `uid: {about.st_uid}` if it is the same person"
                )
    return found


# What `down` would delete


def lost_homes(cluster: Cluster | None, folder: Folder) -> tuple[str, ...]:
    """Return the home folders with files in them, except those on storage that outlives the cluster."""
    storage = home_storage(cluster) if cluster else None
    homes = source_of(storage, folder) if storage else folder.homes
    if not homes.is_relative_to(folder.root):
        return ()
    with contextlib.suppress(OSError):
        return tuple(sorted(home.name for home in homes.iterdir() if any(home.iterdir())))
    return ()


def lost_storage(cluster: Cluster | None, folder: Folder) -> tuple[str, ...]:
    """Return the storage in the state folder that has files in it, except the storage of home folders."""
    inside = [each for each in cluster.storage if each.type == "folder" and not each.source] if cluster else []
    return tuple(each.name for each in inside if not each.home and _has_content(source_of(each, folder)))
